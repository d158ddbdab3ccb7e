"""What each step does, told to the clients that have asked to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.batch import Batch
from quire.protocol.messages import EventType, RequestEvent, SchedulerStats, SequenceTrace, StepTrace


class Tracer:
    """Collects what happens until the step's `StepTrace` is sent.

    Its owner looks at `subscribers` before it calls any of `queued` to `stepped`, so that nobody's steps wait for a
    trace that nobody wants. Each subscription ends with a trace that is marked as the `last`.
    """

    def __init__(self, send: Callable[[bytes, StepTrace], None]) -> None:
        self.subscribers: dict[bytes, None] = {}
        self._send = send
        self._events: list[RequestEvent] = []
        self._sequences: list[SequenceTrace] = []

    def start(self, client_id: bytes, waiting: Iterable[Request], now: float) -> None:
        """Subscribes a client, and tells it who waits already; who runs it sees in the next step."""
        self.subscribers[client_id] = None
        events = [
            _event(request, EventType.PREEMPTED, now)
            if request.status is RequestStatus.PREEMPTED
            else _event(request, EventType.QUEUED, request.arrival)
            for request in waiting
        ]
        self._send(client_id, StepTrace(now, events=events))

    def stop(self, client_id: bytes, now: float) -> None:
        """Ends a subscription; without one it changes nothing, and the client gets its last trace all the same."""
        self.flush(now)
        self.forget(client_id)
        self._send(client_id, StepTrace(now, last=True))

    def forget(self, client_id: bytes) -> None:
        """The client is gone."""
        self.subscribers.pop(client_id, None)
        if not self.subscribers:
            self._events = []

    def queued(self, request: Request, now: float) -> None:
        """A request has come."""
        self._events.append(_event(request, EventType.QUEUED, now))

    def scheduled(self, batch: Batch) -> None:
        """A step is about to compute `batch`; from here on its requests move."""
        for move in batch.moves:
            event = _event(move.request, move.event, move.timestamp)
            event.num_cached_tokens = move.num_cached_tokens
            self._events.append(event)
        self._sequences = [
            SequenceTrace(request.number, request.request_id, request.num_computed_tokens, count)
            for request, count in zip(batch.requests, batch.counts[: len(batch.requests)], strict=True)
        ]
        self._sequences += [
            SequenceTrace(request.number, request.request_id, request.num_computed_tokens, 1)
            for request in batch.searches
        ]

    def finished(self, request: Request, status: RequestStatus, now: float) -> None:
        """A request has ended."""
        event = _event(request, EventType.FINISHED, now)
        event.finish_reason = status.finish_reason
        self._events.append(event)

    def stepped(self, begun: float, stats: SchedulerStats) -> None:
        """The step that was scheduled last is over; `begun`: when it began."""
        self._tell(StepTrace(begun, stats, self._sequences, self._events))

    def flush(self, now: float) -> None:
        """Tells what has happened without a step."""
        if self._events:
            self._tell(StepTrace(now, events=self._events))

    def _tell(self, trace: StepTrace) -> None:
        self._events, self._sequences = [], []  # the old ones are the socket thread's now
        for client_id in self.subscribers:
            self._send(client_id, trace)


def _event(request: Request, kind: EventType, timestamp: float) -> RequestEvent:
    return RequestEvent(request.number, request.request_id, kind, timestamp, request.num_prompt_tokens)
