"""The switch for spans, by flag or environment; it loads OpenTelemetry only if they are requested."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.frontend.metrics.tracing import RequestSpans

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def request_spans(endpoint: str | None, model_name: str) -> RequestSpans | None:
    """Return the observer that sends a span for each request, None if spans are not requested.

    `endpoint` is the URL that receives traces, such as `http://localhost:4318/v1/traces`. Without it, the variable
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT requests spans, unless OTEL_SDK_DISABLED or
    OTEL_TRACES_EXPORTER=none disables them. The other OTEL_* variables apply as well. Raises `ValueError` for invalid
    values, and if the extra `otel` is not installed.
    """
    requested_by = f"--otlp-traces-endpoint {endpoint}" if endpoint is not None else _requested_by(os.environ)
    if requested_by is None:
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"otlp_traces_endpoint={endpoint!r} is not a URL; give one such as http://localhost:4318/v1/traces"
        )
    _check_protocol(os.environ)
    try:
        from quire.frontend.metrics.tracing import open_request_spans
    except ImportError as error:
        raise ValueError(
            f"{requested_by} requests spans, but OpenTelemetry can't be loaded ({error}); install it with "
            "`pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`, or don't request spans"
        ) from None
    return open_request_spans(endpoint, model_name)


def _requested_by(environment: Mapping[str, str]) -> str | None:
    """Return the variable that requests spans."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    return next((f"${name}" for name in _ENDPOINTS if environment.get(name)), None)


def _check_protocol(environment: Mapping[str, str]) -> None:
    for name in _PROTOCOLS:
        if protocol := environment.get(name):
            if protocol != "http/protobuf":
                raise ValueError(f"{name}={protocol} is not supported; set it to http/protobuf, or leave it out")
            return
