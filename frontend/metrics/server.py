"""`ServerMetrics`: all metrics of a server, and the page on which Prometheus finds them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector

from quire.frontend.errors import EngineDeadError
from quire.frontend.metrics.engine import add_configuration, add_engine
from quire.frontend.metrics.families import Families, check_prefix
from quire.frontend.metrics.formats import encode
from quire.frontend.metrics.http import HttpMeter
from quire.frontend.metrics.requests import RequestMeter

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM

STATS_SECONDS = 1.0  # how long a scrape waits for the engine's answer


class ServerMetrics:
    """Metrics in Prometheus' formats, with the names, labels and buckets of vLLM's and some of our own.

    `prefix` begins each name but those of the process: with "vllm" existing dashboards work unchanged. What vLLM has
    and has no meaning here is left out: speculative decoding, sleep, the finish reason "repetition". The labels are
    `model_name`, and `engine`, which is always "0". Metrics of requests and HTTP are this frontend's, so that sums over
    several frontends of one engine are right; those of the engine are the same for each of them.
    Raises `ValueError` for a prefix that can't begin a metric's name.

    `requests` is the observer to be given to `AsyncLLM.add_observer`; it and `http` count, `render` tells.
    """

    def __init__(self, *, model_name: str, max_model_len: int, prefix: str = "quire") -> None:
        check_prefix(prefix)
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self.requests = RequestMeter(max_model_len)
        self.http = HttpMeter()

    async def render(self, llm: AsyncLLM, accept: str = "") -> tuple[bytes, str]:
        """The metrics now, as text or as OpenMetrics if the `Accept` header asks for it; and their content type.

        `engine_up` is 0 when the engine is dead. Its other metrics are missing then, and when it takes more than
        `STATS_SECONDS` to answer.
        """
        stats = await _engine_stats(llm)
        families = Families(self._prefix, self._labels)
        families.gauge("engine_up", "1 while the engine lives.", llm.dead_error is None)
        add_configuration(families, llm.engine_info)
        if stats is not None:
            add_engine(families, stats)
        self.requests.add_to(families)
        self.http.add_to(families)
        registry = CollectorRegistry()
        registry.register(families)
        ProcessCollector(registry=registry)
        return encode(registry, accept)


async def _engine_stats(llm: AsyncLLM) -> dict[str, Any] | None:
    try:
        return await asyncio.wait_for(llm.stats(), STATS_SECONDS)
    except (EngineDeadError, TimeoutError):
        return None
