"""What the server tells of itself: Prometheus metrics, recent rates for the page, OpenTelemetry spans."""
