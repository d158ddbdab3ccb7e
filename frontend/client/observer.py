"""An open request as its observers see it: metrics, spans, and the sparklines of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.frontend.errors import RequestError
from quire.frontend.lora_request import LoRARequest
from quire.frontend.outputs import RequestMetrics
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import EngineCoreOutput, PoolingParams, SamplingParams

Operation = Literal["chat", "text_completion", "embeddings"]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Context of a request for spans, beyond its parameters.

    `headers` are those of its HTTP request, with names in lower case, for `traceparent` and `tracestate`.
    `response_id` is the id that its client knows, if that is not the request id.
    """

    operation: Operation | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    response_id: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request that do not concern its tokens; it ends after `timeout` seconds, None for no limit.

    `tenant`: the party that it is for, "" for this client; tenants share the engine fairly. `session`: name of the
    conversation that it belongs to, which some routers keep on one engine. `lora_request`: the adapter that computes
    it, None for the model alone.
    """

    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    trace: TraceContext = field(default_factory=TraceContext)
    tenant: str = ""
    session: str | None = None
    lora_request: LoRARequest | None = None

    @property
    def adapter(self) -> str:
        """The path of the adapter, "" without one."""
        return "" if self.lora_request is None else self.lora_request.lora_path

    def __post_init__(self) -> None:
        if not isinstance(self.lora_request, LoRARequest | None):
            raise RequestError(f"lora_request is a {type(self.lora_request).__name__}; give a LoRARequest, or None")
        if not -(2**63) <= self.priority < 2**63:
            raise RequestError(f"priority={self.priority} is out of range; it must be from -2**63 to 2**63 - 1")


DEFAULT_OPTIONS = RequestOptions()


class OpenRequest(Protocol):
    """The common interface of generation and embedding requests; only an embedding has `pooling` parameters."""

    request_id: str
    options: RequestOptions
    prompt: Prompt
    engine_params: Sequence[SamplingParams]
    pooling: PoolingParams | None
    metrics: RequestMetrics
    error: Exception | None
    first_chunk_time: float | None
    num_cached_tokens: int

    @property
    def params(self) -> SamplingParams | None:
        """Sampling parameters, None for an embedding."""

    @property
    def finished(self) -> bool:
        """True if the request has ended."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""

    @property
    def longest_output(self) -> int:
        """Number of tokens of the longest completion."""

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reason of each completion, or of the embedding."""

    def append(self, index: int, output: EngineCoreOutput, timestamp: float, /) -> bool:
        """Take an increment of engine request `index`; return True if the engine must be told that it has ended."""

    def continuation(self, index: int, /) -> tuple[SamplingParams, list[int]]:
        """Return the parameters with which engine request `index` goes on, and the tokens after which it does."""


class Observer(Protocol):
    """Callbacks for the requests of a client, on the thread or event loop that handles them; they must return at once.

    Every submitted request is finished exactly once, whatever ends it. `timestamp` is `time.monotonic()` of this
    process when the frame arrived here, which is the time that users see; `request.metrics` has the engine's times.
    """

    def on_submitted(self, request: OpenRequest) -> None:
        """Observe a request on its way to the engine, in the context (`contextvars`) of its consumer."""

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """Observe the first tokens of any completion of a request; `on_tokens` follows."""

    def on_tokens(self, num_tokens: int, num_together: int, gaps: list[float], timestamp: float) -> None:
        """Observe a frame of new tokens: one call for all completions, since this is on the path of every token.

        `gaps` are the seconds since the previous increment of each completion that had one. `num_tokens` counts the
        tokens that the engine generated, of which a stop string may cut off some; `num_together` of them came in one
        increment with the token before. A beam search grows once, at its end, and has no such tokens.
        """

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """Observe the end: all completions have ended, `request.error` is set, or the consumer has left."""
