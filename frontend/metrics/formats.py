"""The two formats in which Prometheus reads metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

_OPEN_METRICS = "application/openmetrics-text"


def encode(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The metrics as OpenMetrics if the `Accept` header names it, else as text; and the content type.

    `prometheus_client.exposition.choose_encoder` is not used: its OpenMetrics lose the colon that follows the prefix.
    """
    kinds = {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}
    if _OPEN_METRICS not in kinds:
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    # No name of ours needs to be escaped, and this is the escaping that leaves colons alone.
    text: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text, f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8"
