"""What one request of a run has felt."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.protocol.messages import ErrorKind

PhaseKind = Literal["queued", "prefill", "decode", "preempted"]


class Outcome(enum.StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    ERRORED = "errored"  # an error, or a connection that broke
    REFUSED = "refused"  # the target had no room
    LATE = "late"  # its time was up
    UNFINISHED = "unfinished"  # the run ended first

    @classmethod
    def of_error(cls, kind: ErrorKind | None) -> Outcome:
        """Of a request that the engine ended with an error of this kind."""
        return cls.REFUSED if kind in {ErrorKind.OVERLOADED, ErrorKind.SHUTTING_DOWN} else cls.ERRORED


class Phase(NamedTuple):
    """What a request was in, from `begin` to `end`; in seconds since the run began."""

    kind: PhaseKind
    begin: float
    end: float


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds since the run began, by the clock of whoever sent the request; lengths are in tokens.

    `arrival` is when the workload wanted it sent, `sent` when it was: the difference is the lag of the replay. `gaps`
    are the seconds between its chunks. `phases` come from the engine's events and are empty where the target tells
    none; `cached_tokens` is None where it does not tell. A warm-up request is in no figure. One that the run's end
    found unsent has no `was_sent`, and its `sent` is when it was due.
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
        """Seconds by which it was sent too late."""
        return self.sent - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from its sending to its first chunk."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2e(self) -> float | None:
        """Seconds from its sending to its last chunk."""
        return None if self.last_token is None else self.last_token - self.sent

    @property
    def is_short(self) -> bool:
        """Whether it completed with fewer tokens than the workload wanted."""
        return self.outcome is Outcome.COMPLETED and self.output_tokens < self.wanted_output_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for an answer of one token."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


class Sample(NamedTuple):
    """The target at one moment, `time` seconds after the run began; None where it does not tell.

    Requests and KV pages are counted now, tokens since the target's start.
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
