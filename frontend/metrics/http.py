"""Metrics of the HTTP server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from quire.frontend.metrics import prometheus
from quire.frontend.metrics.prometheus import Families
from quire.protocol.totals import Distribution

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class HttpMeter:
    """Counts of requests by route, status and method, and of open streams."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._times: dict[tuple[str, str], Distribution] = {}
        self._open_streams = 0

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has been answered; `route` is a path of the server, never text of the client."""
        method = method if method in _METHODS else "other"
        self._requests[route, method, str(status)] += 1
        if (route, method) not in self._times:
            self._times[route, method] = Distribution.of(prometheus.HTTP_TIME)
        self._times[route, method].observe(seconds)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream as open for the duration of the `with`."""
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    def add_to(self, families: Families) -> None:
        """Add all metrics."""
        labels = ("route", "method")
        text = "Requests by route, method and status."
        families.counters("http_requests", text, (*labels, "status"), self._requests.items())
        text = "Time from the request's headers to the response's last byte."
        families.histograms("http_request_duration_seconds", text, labels, self._times.items())
        families.gauge("http_streams_in_flight", "Open streams.", self._open_streams)
