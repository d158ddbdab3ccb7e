"""Whether spans are asked for, and where they go; loads OpenTelemetry only then."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.frontend.metrics.tracing import RequestSpans

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def request_spans(endpoint: str | None, model_name: str) -> RequestSpans | None:
    """The observer that sends a span for each request, None if nobody has asked for that.

    `endpoint` is the URL that takes traces, such as `http://localhost:4318/v1/traces`; without it one of the variables
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT asks for spans, unless OTEL_SDK_DISABLED or
    OTEL_TRACES_EXPORTER=none forbids them. The other OTEL_* variables count as well. Raises `ValueError` for what can't
    be done, also when the extra `otel` is not installed.
    """
    asked = f"--otlp-traces-endpoint {endpoint}" if endpoint is not None else _asked_by(os.environ)
    if asked is None:
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
            f"{asked} asks for spans, but OpenTelemetry can't be loaded ({error}); install it with "
            "`pip install 'quire[otel]'`, or don't ask for spans"
        ) from None
    return open_request_spans(endpoint, model_name)


def _asked_by(environment: Mapping[str, str]) -> str | None:
    """The variable that asks for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    return next((f"${name}" for name in _ENDPOINTS if environment.get(name)), None)


def _check_protocol(environment: Mapping[str, str]) -> None:
    for name in _PROTOCOLS:
        if protocol := environment.get(name):
            if protocol != "http/protobuf":
                raise ValueError(f"{name}={protocol} is not supported; set it to http/protobuf, or leave it out")
            return
