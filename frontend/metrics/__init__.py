"""Observability: Prometheus metrics, recent rates for the page, OpenTelemetry spans, traces of the engine's steps."""
