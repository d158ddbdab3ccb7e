"""Messages between a command and the process that simulates engines for it, and the file that calibration writes.

Messages travel through pipes, in frames of their length (four bytes, little-endian) and their bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import IO, Annotated, NamedTuple

import msgspec

from quire.protocol.engine_shape import EngineShape
from quire.protocol.errors import ProtocolError
from quire.protocol.messages import EngineCoreEvent, ErrorKind
from quire.protocol.speculative_config import SpeculativeConfig

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model of the seconds of an engine's step, from its start to the start of the next: a sum over the step's work.

    `base`: for the step itself; `prefill_token`: for each prefill token; `decode`: for each decoding sequence;
    `kv_token`: for each token of the KV cache that decoding sequences read; `prefill_squared`: for the square of a
    prompt's length, whose tokens attend to each other; `prefill_total_squared`: for the square of all prefill tokens of
    the step, since the more there are, the less of its data stays in the CPU's caches.
    """

    base: _Seconds
    prefill_token: _Seconds
    decode: _Seconds
    kv_token: _Seconds = 0.0
    prefill_squared: _Seconds = 0.0
    prefill_total_squared: _Seconds = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step with this work."""
        return (
            self.base
            + self.prefill_token * work.prefill_tokens
            + self.decode * work.decodes
            + self.kv_token * work.kv_tokens
            + self.prefill_squared * work.prefill_squares
            + self.prefill_total_squared * work.prefill_tokens**2
        )


class Rest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delay of a first token after a rest: `later` than when there is always work, after `seconds` without any."""

    seconds: _Seconds
    later: _Seconds


class ClientTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds between a client and its engine.

    `to_engine`: from sending a request to its place in the queue; `to_client`: from the end of a step to the client
    having its tokens; `to_next`: between two requests that a client sends one after the other; `to_wake`: until an
    engine that has just had work starts a step. `rests`: delays after some time without work, the shortest first, when
    others use the caches and processors sleep. Nothing is added before the first, and no more after the last.
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
        """Return the seconds until an engine that was idle for so long starts a step, interpolated between rests."""
        after = bisect_right(self.rests, idle, key=lambda rest: rest.seconds)
        if after == 0:
            return self.to_wake
        before = self.rests[after - 1]
        if after == len(self.rests):
            return self.to_wake + before.later
        following = self.rests[after]
        share = (idle - before.seconds) / (following.seconds - before.seconds)
        return self.to_wake + before.later + share * (following.later - before.later)


class FetchTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds in which an engine fetches KV pages from another one.

    `connect`: from the first request that might fetch, and computes its prompt, until there are pages to be had;
    `answer`: from asking until pages begin to come, or the word that there are none; `token`: for the KV of each token,
    its bytes by the rate at which they come. The defaults, of calibrations without measured ones, are those of a small
    model (20 KiB a token at 1 GB/s) between processes of a host.
    """

    connect: _Seconds = 0.5
    answer: _Seconds = 1e-3
    token: _Seconds = 2e-5


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed of an engine on a host, as `quire calibrate` measures it and writes it as JSON.

    `error`: the median of |model - measured| / measured over the `steps` that the model was fitted to.
    `held_out_error`: the same over steps that a fit had not seen. `noise`: how much longer the same step took when it
    was measured again, in the median. `doubts`: why the model cannot be trusted, if it was written nevertheless.
    """

    model: str
    host: str
    date: str
    engine: EngineShape
    step: StepTime
    client: ClientTime = ClientTime()
    fetch: FetchTime = FetchTime()
    steps: int = 0
    error: float = 0.0
    held_out_error: float | None = None
    noise: float | None = None
    doubts: tuple[str, ...] = ()


class StepWork(NamedTuple):
    """Work of a step as `StepTime` counts it; a sequence that computes one token is decoding."""

    prefill_tokens: int
    decodes: int
    kv_tokens: int  # tokens that decoding sequences have in the KV cache
    prefill_squares: int  # squares of computed prompt tokens after the step, less those before it

    @classmethod
    def of(cls, starts: Sequence[int], counts: Sequence[int]) -> StepWork:
        """Return the work of a step that computes tokens `[start, start + count)` of each sequence."""
        decodes = counts.count(1)
        tokens, read, squares = sum(counts) - decodes, sum(starts), 0
        if tokens:
            for start, count in zip(starts, counts, strict=True):
                if count > 1:
                    read -= start
                    squares += count * (2 * start + count)
        return cls(tokens, decodes, read, squares)


class SimulatedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A request to simulate, with the fields of a workload's request. `index` counts requests from 0."""

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: list[int]
    block_tokens: int
    session: str | None = None
    delay: float = 0.0


class SimulationSetup(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Setup of a simulation: `num_engines` behind a router, with a sample every `sample_seconds` of virtual time.

    While all engines are idle, there is a sample only at the start and at the end of that time.

    `tells_lengths`: `max_tokens` tells engines how long an answer will be; otherwise it may be as long as the context.
    `concurrency`: users of a closed loop, who send a request when they have their answer; arrivals are ignored.
    `speculative_config`: how engines draft tokens, with the acceptance length. `fetch`: the time in which engines fetch
    prefixes from one another, if the router says from which; None: they do not.
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
    speculative_config: SpeculativeConfig | None = None
    fetch: FetchTime | None = None


class SimulatedResult(msgspec.Struct, array_like=True, gc=False, tag=1):
    """Result of a request. All times are virtual seconds, as the client sees them except for `events`.

    `sent` is later than the arrival if the request waited for an earlier turn of its session or for a free user.
    `token_times` are float64. `events` have the engine's times. The request is complete unless there is an `error`,
    of which `error_kind` says whose fault it was.
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
    """State of all engines together at one moment. Tokens count from the start, of requests that have been admitted."""

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
    """Totals of one engine. `busy_seconds`: time of its steps; pages are those at the end.

    `fetched_tokens`: tokens whose KV has come from another engine.
    """

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
    fetched_tokens: int = 0


class SimulationEnd(msgspec.Struct, array_like=True, tag=3):
    """End of the simulation, `seconds` after its start, when all requests have ended."""

    seconds: float
    engines: list[EngineSummary]


SimulationOutput = list[SimulatedResult | SimulationSample | SimulationEnd]
"""A message of the process that simulates."""

MAX_PIPE_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Write a frame and flush; return when the pipe has taken it. Raises BrokenPipeError if nobody reads."""
    stream.write(len(frame).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame, None at the end. Raises ProtocolError for one that is too large or cut off."""
    head = stream.read(_LENGTH_BYTES)
    if not head:
        return None
    length = int.from_bytes(head, "little")
    if length > MAX_PIPE_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is announced, at most {MAX_PIPE_FRAME_BYTES} are accepted")
    frame = stream.read(length)
    if len(head) < _LENGTH_BYTES or len(frame) < length:
        raise ProtocolError(f"the pipe ended in the middle of a frame, after {len(head) + len(frame)} bytes of it")
    return frame
