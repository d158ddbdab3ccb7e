"""Records of a run: its clock, the times and phases of each request, and samples of the target's state."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.protocol.messages import EngineCoreOutput, ErrorKind, EventType

TOGETHER = 1e-4
"""Seconds within which tokens come together, whether or not they are in one message: less than any step takes."""

PhaseKind = Literal["queued", "prefill", "decode", "preempted"]


class RunClock:
    """Seconds since its construction, on the monotonic clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.begin

    def of(self, timestamp: float) -> float:
        """Return `timestamp` of `time.monotonic()` as seconds since the run began."""
        return timestamp - self.begin


class Outcome(enum.StrEnum):
    """End of a request."""

    COMPLETED = "completed"
    ERRORED = "errored"  # an error, or a connection that broke
    REFUSED = "refused"  # the target was overloaded
    LATE = "late"  # it took longer than its timeout
    UNFINISHED = "unfinished"  # the run ended first

    @classmethod
    def of_error(cls, kind: ErrorKind | None) -> Outcome:
        """Return the outcome of a request that the engine ended with an error of this kind."""
        return cls.REFUSED if kind in {ErrorKind.OVERLOADED, ErrorKind.SHUTTING_DOWN} else cls.ERRORED


class Phase(NamedTuple):
    """Phase of a request from `begin` to `end`, in seconds since the run began."""

    kind: PhaseKind
    begin: float
    end: float


@dataclass(slots=True)
class RequestRecord:
    """Times and lengths of one request: seconds since the run began, on the sender's clock, and tokens.

    `arrival` is when the workload wanted it sent, `sent` when it was: the difference is the lag of the replay. `gaps`
    are the seconds from the begin of each increment to that of the next; all tokens that come within `TOGETHER` belong
    to one. `phases` come from the engine's events and are empty where the target has none; `cached_tokens` is None
    where the target does not report it. A warm-up request counts in no figure. A request that was still unsent when the
    run ended has a false `was_sent`, and its `sent` is when it was due.
    """

    index: int
    arrival: float
    sent: float
    prompt_tokens: int
    wanted_output_tokens: int
    outcome: Outcome = Outcome.UNFINISHED
    error: str | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float = 0.0
    output_tokens: int = 0
    cached_tokens: int | None = None
    gaps: array[float] = field(default_factory=lambda: array("d"))
    phases: list[Phase] = field(default_factory=list)
    num_preemptions: int = 0
    engine: int = 0
    is_warm_up: bool = False
    was_sent: bool = True

    def grow(self, num_tokens: int, now: float) -> None:
        """Take tokens that arrived `now`, with those before or as a new increment."""
        if self.last_token is None:
            self.first_token = self.last_token = now
        elif now - self.last_token >= TOGETHER:
            self.gaps.append(now - self.last_token)
            self.last_token = now
        self.output_tokens += num_tokens

    @property
    def lag(self) -> float:
        """Seconds by which the request was sent too late."""
        return self.sent - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from sending the request to its first increment."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2e(self) -> float | None:
        """Seconds from sending the request to its last increment."""
        return None if self.last_token is None else self.last_token - self.sent

    @property
    def is_short(self) -> bool:
        """True if the request completed with fewer tokens than the workload wanted."""
        return self.outcome is Outcome.COMPLETED and self.output_tokens < self.wanted_output_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    @property
    def num_together(self) -> int:
        """Number of tokens that came in one increment with the token before."""
        return max(0, self.output_tokens - 1 - len(self.gaps))

    @property
    def queue_time(self) -> float | None:
        """Seconds from queued to first scheduled; None where the target reports no events."""
        if not self.phases or self.phases[0].kind != "queued":
            return None
        return self.phases[0].end - self.phases[0].begin

    @property
    def prefill_time(self) -> float | None:
        """Seconds from first scheduled to the first token, preemptions included; None where there are no events."""
        if self.queue_time is None:
            return None
        first_tokens = [phase.begin for phase in self.phases if phase.kind == "decode"]
        ends = [phase.end for phase in self.phases if phase.kind == "prefill"]
        if not ends:
            return None
        return (first_tokens[0] if first_tokens else ends[-1]) - self.phases[0].end


class TargetSample(NamedTuple):
    """State of the target `time` seconds after the run began; None where it does not report a field.

    Requests and KV pages are current counts, tokens count since the target's start.
    """

    time: float
    running: int | None = None
    waiting: int | None = None
    pages_held: int | None = None
    pages_cached: int | None = None
    pages_total: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


_OPENED: dict[EventType, PhaseKind] = {
    EventType.QUEUED: "queued",
    EventType.SCHEDULED: "prefill",
    EventType.FIRST_TOKEN: "decode",
    EventType.PREEMPTED: "preempted",
}


class Phases:
    """Consecutive phases of one request, written to its record.

    After a preemption, the recomputation is a prefill until the next token. Times are seconds since the run began.
    """

    __slots__ = ("_kind", "_record", "begin")

    def __init__(self, record: RequestRecord) -> None:
        self.begin = 0.0  # of the current phase
        self._record = record
        self._kind: PhaseKind | None = None

    @property
    def is_catching_up(self) -> bool:
        """True if the next token ends a phase, for which there may be no event."""
        return self._kind == "prefill"

    def take(self, event: EventType, at: float) -> None:
        """Take an event of the engine."""
        if event is EventType.FINISHED:
            self.end(at)
        elif _OPENED[event] != self._kind:
            self._enter(_OPENED[event], at)
        self._record.num_preemptions += event is EventType.PREEMPTED

    def take_token(self, at: float) -> None:
        """Take a token that ends a prefill."""
        self._enter("decode", at)

    def end(self, at: float) -> None:
        """End the last phase, `at` seconds after the run began. Idempotent."""
        if self._kind is not None:
            self._record.phases.append(Phase(self._kind, self.begin, max(at, self.begin)))
        self._kind = None

    def _enter(self, kind: PhaseKind, at: float) -> None:
        at = max(at, self.begin)
        self.end(at)
        self._kind, self.begin = kind, at


class PhaseTrack(Phases):
    """Phases from an engine's increments as they arrive.

    The engine's clock is assumed to be ours, as it is on one machine. If the request would have been queued before it
    was sent, or after the event arrived, the engine is on another machine: then its times count from the sending.
    """

    __slots__ = ("_clock", "_shift")

    def __init__(self, record: RequestRecord, clock: RunClock) -> None:
        super().__init__(record)
        self._clock = clock
        self._shift: float | None = None

    def note(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Take the events of an increment whose last step was at `timestamp` on the engine's clock."""
        for event in output.events:
            self.take(event.type, self._time(event.timestamp))
        if self.is_catching_up and output.new_token_ids:
            self.take_token(self._time(timestamp))

    def _time(self, timestamp: float) -> float:
        at = self._clock.of(timestamp)
        if self._shift is None:
            is_ours = self._record.sent <= at <= self._clock.now()
            self._shift = 0.0 if is_ours else self._record.sent - at
        return at + self._shift
