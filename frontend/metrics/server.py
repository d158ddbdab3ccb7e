"""The metrics of a server, its models and their engines, in the formats that Prometheus scrapes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector

from quire.frontend.metrics import prometheus
from quire.frontend.metrics.engine import add_configuration, add_engine
from quire.frontend.metrics.prometheus import Families, MergedFamilies, check_prefix, encode
from quire.frontend.metrics.requests import RequestMeter
from quire.protocol.totals import Distribution

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM


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


STATS_SECONDS = 1.0  # for which a scrape waits for the engine's statistics


class ServerMetrics:
    """Metrics of a model of a server, with vLLM's names, labels and buckets, and some of our own.

    `prefix` begins each name except those of the process: with "vllm" existing dashboards work unchanged. The labels
    are `model_name`, and `engine`, the number of the engine for its metrics and "0" for those of requests and HTTP.
    These cover this frontend, so that they add up over several frontends of one engine; metrics of an engine are the
    same for all its frontends.
    Raises `ValueError` for a prefix that is invalid in metric names.

    `requests_of` returns an observer for `AsyncLLM.add_observer`; it and `http` count, `render` reports. Counts go on
    when the model is unloaded and loaded again.
    """

    def __init__(self, *, model_name: str, prefix: str = "quire") -> None:
        check_prefix(prefix)
        self.prefix = prefix
        self.labels = {"model_name": model_name, "engine": "0"}
        self.http = HttpMeter()
        self._requests: RequestMeter | None = None

    def requests_of(self, max_model_len: int) -> RequestMeter:
        """Return the observer of the model's requests, made when the model is loaded for the first time."""
        if self._requests is None:
            self._requests = RequestMeter(max_model_len)
        return self._requests

    def adapter_requests(self) -> Counter[str]:
        """Return the number of open requests that name each adapter of the model."""
        return Counter() if self._requests is None else self._requests.adapters.counts()

    async def add_to(self, families: Families, llm: AsyncLLM | None) -> None:
        """Add all metrics; without `llm` the model is not loaded.

        `engine_up` is 0 if the engine is dead, or is being started again. Its other metrics are missing then, and also
        if it does not answer within `STATS_SECONDS`.
        """
        families.gauges("engine_sleep_state", _SLEEP_STATE, "sleep_state", _sleep_states(llm is not None))
        if llm is not None:
            await _add_engines(families, llm)
        if self._requests is not None:
            self._requests.add_to(families)
            if llm is not None:
                self._requests.adapters.add_to(families, llm.engine_info.adapters)
        self.http.add_to(families)


_SLEEP_STATE = "1 for the state of the engine: awake, or discard_all while the model is not loaded."


def _sleep_states(is_awake: bool) -> dict[str, float]:
    """Return vLLM's states of an engine; there is none here in which weights are kept elsewhere."""
    return {"awake": is_awake, "weights_offloaded": 0, "discard_all": not is_awake}


async def render(models: Iterable[tuple[ServerMetrics, AsyncLLM | None]], accept: str = "") -> tuple[bytes, str]:
    """Return the current metrics of models, and their content type: text, or OpenMetrics if `Accept` names it.

    A model that is not loaded has no `AsyncLLM`.
    """
    known = list(models)
    collected = [Families(metrics.prefix, metrics.labels) for metrics, _ in known]
    await asyncio.gather(
        *(metrics.add_to(families, llm) for families, (metrics, llm) in zip(collected, known, strict=True))
    )
    registry = CollectorRegistry()
    registry.register(MergedFamilies(collected))
    ProcessCollector(registry=registry)
    return encode(registry, accept)


async def _add_engines(families: Families, llm: AsyncLLM) -> None:
    stats = await _engine_stats(llm)
    for engine in llm.engines():
        with families.labelled(engine=str(engine.number)):
            is_up = llm.dead_error is None and engine.state != "away"
            families.gauge("engine_up", "1 while the engine is alive.", is_up)
            families.counter("engine_losses", "Times that the engine was lost.", engine.num_losses)
            add_configuration(families, engine.ready)
            if engine.number in stats:
                add_engine(families, stats[engine.number])
    text = "Requests sent to an engine, and why: its turn, its load, the session or the prefix that it has."
    families.counters("requests_routed", text, ("to", "reason"), llm.routed().items())


async def _engine_stats(llm: AsyncLLM) -> dict[int, dict[str, Any]]:
    try:
        return await llm.engine_stats(STATS_SECONDS)
    except (RuntimeError, TimeoutError):  # the engine is dead, has no answer, or there are no replicas of it
        return {}
