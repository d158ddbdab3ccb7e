"""Phases of a request, from the engine's events."""

from __future__ import annotations

from quire.frontend.evaluation.replay.record import Phase, PhaseKind, RequestRecord, RunClock
from quire.protocol.messages import EngineCoreOutput, EventType

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
