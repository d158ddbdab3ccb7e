"""Turns an engine's events of a request into the phases it went through."""

from __future__ import annotations

from quire.frontend.evaluation.replay.clock import Clock
from quire.frontend.evaluation.replay.record import Phase, PhaseKind, RequestRecord
from quire.protocol.messages import EngineCoreOutput, EventType

_OPENED: dict[EventType, PhaseKind] = {
    EventType.QUEUED: "queued",
    EventType.SCHEDULED: "prefill",
    EventType.FIRST_TOKEN: "decode",
    EventType.PREEMPTED: "preempted",
}


class Phases:
    """Writes the phases of one request to its record, each from where the one before it ends.

    After a preemption, what is computed again is a prefill until the next token. Times are seconds of the run.
    """

    __slots__ = ("_kind", "_record", "begin")

    def __init__(self, record: RequestRecord) -> None:
        self.begin = 0.0  # of the phase it is in
        self._record = record
        self._kind: PhaseKind | None = None

    @property
    def is_catching_up(self) -> bool:
        """Whether the next token ends a phase, of which no event may tell."""
        return self._kind == "prefill"

    def take(self, event: EventType, at: float) -> None:
        """The engine tells of an event."""
        if event is EventType.FINISHED:
            self.end(at)
        elif _OPENED[event] != self._kind:
            self._enter(_OPENED[event], at)
        self._record.num_preemptions += event is EventType.PREEMPTED

    def take_token(self, at: float) -> None:
        """A token has come while it was catching up."""
        self._enter("decode", at)

    def end(self, at: float) -> None:
        """The request has ended, `at` seconds after the run began; idempotent."""
        if self._kind is not None:
            self._record.phases.append(Phase(self._kind, self.begin, max(at, self.begin)))
        self._kind = None

    def _enter(self, kind: PhaseKind, at: float) -> None:
        at = max(at, self.begin)
        self.end(at)
        self._kind, self.begin = kind, at


class PhaseTrack(Phases):
    """Takes them from an engine's increments as they come.

    The engine's clock is taken for ours, as it is on one machine; where the request would have been queued before it
    was sent, or after this was heard of, the engine is on another machine: then its times count from the sending.
    """

    __slots__ = ("_clock", "_shift")

    def __init__(self, record: RequestRecord, clock: Clock) -> None:
        super().__init__(record)
        self._clock = clock
        self._shift: float | None = None

    def note(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Take the events of an increment whose last step was at `timestamp` of the engine's clock."""
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
