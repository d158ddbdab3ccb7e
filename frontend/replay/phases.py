"""Turns an engine's events of a request into the phases it went through."""

from __future__ import annotations

from quire.frontend.replay.clock import Clock
from quire.frontend.replay.record import Phase, PhaseKind, RequestRecord
from quire.protocol.messages import EngineCoreOutput, EventType

_OPENED: dict[EventType, PhaseKind] = {
    EventType.QUEUED: "queued",
    EventType.SCHEDULED: "prefill",
    EventType.FIRST_TOKEN: "decode",
    EventType.PREEMPTED: "preempted",
}


class PhaseTrack:
    """Writes the phases of one request to its record, each from where the one before it ends.

    After a preemption, what is computed again is a prefill until the next token. The engine's clock is taken for ours,
    as it is on one machine; where the request would have been queued before it was sent, or after this was heard of,
    the engine is on another machine: then its times count from the sending.
    """

    __slots__ = ("_begin", "_clock", "_kind", "_record", "_shift")

    def __init__(self, record: RequestRecord, clock: Clock) -> None:
        self._record = record
        self._clock = clock
        self._kind: PhaseKind | None = None
        self._begin = 0.0
        self._shift: float | None = None

    @property
    def is_catching_up(self) -> bool:
        """Whether the next token ends a phase, of which no event tells."""
        return self._kind == "prefill"

    def note(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Take the events of an increment whose last step was at `timestamp` of the engine's clock."""
        for event in output.events:
            at = self._time(event.timestamp)
            if event.type is EventType.FINISHED:
                self.end(at)
            elif _OPENED[event.type] != self._kind:
                self._enter(_OPENED[event.type], at)
            self._record.num_preemptions += event.type is EventType.PREEMPTED
        if self.is_catching_up and output.new_token_ids:
            self._enter("decode", self._time(timestamp))

    def end(self, at: float) -> None:
        """The request has ended, `at` seconds after the run began; idempotent."""
        if self._kind is not None:
            self._record.phases.append(Phase(self._kind, self._begin, max(at, self._begin)))
        self._kind = None

    def _enter(self, kind: PhaseKind, at: float) -> None:
        at = max(at, self._begin)
        self.end(at)
        self._kind, self._begin = kind, at

    def _time(self, timestamp: float) -> float:
        at = self._clock.of(timestamp)
        if self._shift is None:
            is_ours = self._record.sent <= at <= self._clock.now()
            self._shift = 0.0 if is_ours else self._record.sent - at
        return at + self._shift
