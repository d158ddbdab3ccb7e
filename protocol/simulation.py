"""What crosses between a command that simulates engines and the process that does it, and what calibration writes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec

from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreEvent, ErrorKind

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of an engine's step, from its begin to the next one's: a sum over what the step computes.

    So much for itself, for each token of a prompt, for each sequence that decodes, for each token of KV memory that
    these read, for the square of a prompt's length, whose tokens attend to each other, and for the square of how many
    tokens of prompts the step has: the more, the less of what it computes stays in the caches.
    """

    base: _Seconds
    prefill_token: _Seconds
    decode: _Seconds
    kv_token: _Seconds = 0.0
    prefill_squared: _Seconds = 0.0
    prefill_total_squared: _Seconds = 0.0

    def seconds(self, work: StepWork) -> float:
        """What a step of this work takes."""
        return (
            self.base
            + self.prefill_token * work.prefill_tokens
            + self.decode * work.decodes
            + self.kv_token * work.kv_tokens
            + self.prefill_squared * work.prefill_squares
            + self.prefill_total_squared * work.prefill_tokens**2
        )


class Rest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After so many seconds without work a first token comes so much later than when there is always some."""

    seconds: _Seconds
    later: _Seconds


class ClientTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds between a client and its engine: from the sending of a request to its place in the queue, from the end of
    a step to the client that has its tokens, between two requests that the client sends one after the other, and until
    an engine that has just had work begins its step.

    `rests` are what it takes longer after some time without work, the shortest first: caches are others' by then, and
    processors have gone to sleep. After less than the first nothing is added, after more than the last no more.
    """

    to_engine: _Seconds = 0.0
    to_client: _Seconds = 0.0
    to_next: _Seconds = 0.0
    to_wake: _Seconds = 0.0
    rests: tuple[Rest, ...] = ()

    def __post_init__(self) -> None:
        if any(before.seconds >= after.seconds for before, after in pairwise(self.rests)):
            raise ValueError("rests must be given in order, the shortest first")

    def wake_seconds(self, idle: float) -> float:
        """Until a step begins, of an engine that has had no work for so long; between rests on a straight line."""
        after = bisect_right(self.rests, idle, key=lambda rest: rest.seconds)
        if after == 0:
            return self.to_wake
        before = self.rests[after - 1]
        if after == len(self.rests):
            return self.to_wake + before.later
        following = self.rests[after]
        share = (idle - before.seconds) / (following.seconds - before.seconds)
        return self.to_wake + before.later + share * (following.later - before.later)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast an engine is on a host, as `quire calibrate` measures it and keeps it as JSON.

    `error`: the median of |model - measured| / measured over the steps that it was fitted to; `steps`: how many.
    """

    model: str
    host: str
    date: str
    engine: EngineShape
    step: StepTime
    client: ClientTime = ClientTime()
    steps: int = 0
    error: float = 0.0


class StepWork(NamedTuple):
    """What a step computes, as `StepTime` counts it; a sequence that computes one token decodes."""

    prefill_tokens: int
    decodes: int
    kv_tokens: int  # before those that decode
    prefill_squares: int  # of how far prompts have come, less those of how far they had: in all, their lengths' squares

    @classmethod
    def of(cls, starts: Sequence[int], counts: Sequence[int]) -> StepWork:
        """Of a step that computes tokens `[start, start + count)` of each sequence."""
        decodes = counts.count(1)
        tokens, read, squares = sum(counts) - decodes, sum(starts), 0
        if tokens:
            for start, count in zip(starts, counts, strict=True):
                if count > 1:
                    read -= start
                    squares += count * (2 * start + count)
        return cls(tokens, decodes, read, squares)


class SimulatedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A request to simulate; fields mean what those of a workload's request do. `index` counts them from 0."""

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: list[int]
    block_tokens: int
    session: str | None = None
    delay: float = 0.0


class SimulationSetup(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What is simulated: so many engines behind a router, with a sample every so many virtual seconds.

    While no engine has anything to do, there is a sample at the begin and at the end of that alone.

    `tells_lengths`: engines know from the start how long an answer will be, by `max_tokens`; else it may be as long as
    the context. With `concurrency` requests come when so many users have their answers, whatever their arrivals.
    """

    engine: EngineShape
    step: StepTime
    client: ClientTime
    num_engines: int
    router: str
    seed: int = 0
    tells_lengths: bool = True
    sample_seconds: float = 1.0
    concurrency: int | None = None


class SimulatedResult(msgspec.Struct, array_like=True, gc=False, tag=1):
    """What became of a request; all times are virtual seconds, those of the client but for `events`.

    `sent` is not its arrival where it had to wait for an earlier turn of its session, or came when a user was free.
    `token_times` are float64.
    `events` have the engine's times. Without an `error` it is whole, else `error_kind` says whose fault it was.
    """

    index: int
    arrival: float
    sent: float
    ended: float
    engine: int
    prompt_tokens: int
    wanted_output_tokens: int
    token_times: bytes
    events: list[EngineCoreEvent]
    cached_tokens: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None


class SimulationSample(msgspec.Struct, array_like=True, gc=False, tag=2):
    """All engines together at one moment. Tokens are counted since the begin, of requests that have started."""

    time: float
    running: int
    waiting: int
    pages_held: int
    pages_cached: int
    pages_total: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class EngineSummary(msgspec.Struct, array_like=True, gc=False):
    """What one engine has done. `busy_seconds`: of its steps; pages are those of the end."""

    requests: int
    steps: int
    busy_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    evictions: int
    pages_free: int
    pages_cached: int
    pages_held: int


class SimulationEnd(msgspec.Struct, array_like=True, tag=3):
    """All requests have ended, `seconds` after the begin."""

    seconds: float
    engines: list[EngineSummary]


SimulationOutput = list[SimulatedResult | SimulationSample | SimulationEnd]
"""What the process that simulates writes, in frames."""
