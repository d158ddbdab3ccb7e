"""Records of a run: its clock, the times of each request, and samples of the target's state."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.protocol.messages import ErrorKind

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
    are the seconds between its chunks. `phases` come from the engine's events and are empty where the target has none;
    `cached_tokens` is None where the target does not report it. A warm-up request counts in no figure. A request that
    was still unsent when the run ended has a false `was_sent`, and its `sent` is when it was due.
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

    @property
    def lag(self) -> float:
        """Seconds by which the request was sent too late."""
        return self.sent - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from sending the request to its first chunk."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2e(self) -> float | None:
        """Seconds from sending the request to its last chunk."""
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
