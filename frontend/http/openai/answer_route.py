"""The way of an answer through the engines, for clients that ask for it."""

from __future__ import annotations

import msgspec

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.outputs import RequestMetrics, RouteHop


class AnswerRoute(msgspec.Struct):
    """The engines that an answer's request was sent to, the latest last, of `engines` that there are."""

    engines: int
    router: str
    hops: list[RouteHop]


def route_of_answer(llm: AsyncLLM, metrics: RequestMetrics) -> AnswerRoute:
    """Return the route of a request that has ended."""
    return AnswerRoute(len(llm.engines()), llm.router, metrics.route)
