"""Who is told of what happens to a client's requests: metrics, spans, the page's sparklines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from quire.frontend.client.request_table import OpenRequest

Operation = Literal["chat", "text_completion", "embeddings"]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What an observer of a request can't know from its parameters.

    `headers`: those of the HTTP request it came with, by names in lower case, for `traceparent` and `tracestate`.
    `response_id`: what its client knows it by, if not by its request id.
    """

    operation: Operation | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    response_id: str | None = None


class Observer(Protocol):
    """Called in the thread, or on the event loop, that handles the requests; so each call must return at once.

    Every request that is submitted is finished exactly once, whatever ends it. `timestamp` is `time.monotonic()` of
    this process when the frame arrived here, which is what a user sees; the engine's times are in `request.metrics`.
    """

    def on_submitted(self, request: OpenRequest) -> None:
        """It is on its way to the engine. The caller's context (`contextvars`) is that of the request's consumer."""

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """The first tokens of any of its completions are here; `on_tokens` follows."""

    def on_tokens(self, num_tokens: int, gaps: list[float], timestamp: float) -> None:
        """A frame made completions grow: one call for all of them, since this is on the path of each token.

        `gaps` has, for each that had grown before, the seconds since then. `num_tokens` are those that the engine has
        generated, of which a stop string may cut off some. A beam search grows once, by all of its beams.
        """

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """It has ended: all completions have, or `request.error` is set; otherwise its consumer has left."""
