"""Traces of the steps, for the clients that have subscribed to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.batch import Batch
from quire.protocol.messages import EventType, FinishReason, RequestEvent, SchedulerStats, SequenceTrace, StepTrace


class Tracer:
    """Collects events until the step's `StepTrace` is sent.

    Its owner looks at `subscribers` before it calls any of `queued` to `stepped`, so that no step waits for a trace
    that no client wants. Each subscription ends with a trace that is marked as the `last`.
    """

    def __init__(self, send: Callable[[bytes, StepTrace], None]) -> None:
        self.subscribers: dict[bytes, None] = {}
        self._send = send
        self._events: list[RequestEvent] = []
        self._sequences: list[SequenceTrace] = []

    def start(self, client_id: bytes, waiting: Iterable[Request], now: float) -> None:
        """Subscribe a client, and send it the waiting requests; it sees the running ones in the next step."""
        self.subscribers[client_id] = None
        events = [
            _event(request, EventType.PREEMPTED, now)
            if request.status is RequestStatus.PREEMPTED
            else _event(request, EventType.QUEUED, request.arrival)
            for request in waiting
        ]
        self._send(client_id, StepTrace(now, events=events))

    def stop(self, client_id: bytes, now: float) -> None:
        """End a subscription, if there is one; the client gets its last trace in any case."""
        self.flush(now)
        self.forget(client_id)
        self._send(client_id, StepTrace(now, last=True))

    def forget(self, client_id: bytes) -> None:
        """Drop a client that is gone."""
        self.subscribers.pop(client_id, None)
        if not self.subscribers:
            self._events = []

    def queued(self, request: Request) -> None:
        """Note that a request has arrived."""
        self._events.append(_event(request, EventType.QUEUED, request.arrival))

    def scheduled(self, batch: Batch) -> None:
        """Note the batch of the next step, before its requests move on. The beams of a search count as one."""
        for scheduled in batch.events:
            event = _event(scheduled.request, scheduled.type, scheduled.timestamp)
            event.num_cached_tokens = scheduled.num_cached_tokens
            self._events.append(event)
        self._sequences = [
            SequenceTrace(request.number, request.request_id, request.num_computed_tokens, batch.step.counts[row])
            for request, row in zip(batch.requests, batch.rows, strict=True)
        ]

    def finished(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Note that a request has ended."""
        event = _event(request, EventType.FINISHED, now)
        event.finish_reason = reason
        self._events.append(event)

    def stepped(self, begun: float, stats: SchedulerStats, batch: Batch) -> None:
        """Send the trace of the step that was scheduled last and began at `begun`."""
        for sequence, drafts, accepted in zip(self._sequences, batch.step.num_drafts, batch.accepted, strict=False):
            sequence.num_drafts, sequence.num_accepted = drafts, accepted
        self._send_all(StepTrace(begun, stats, self._sequences, self._events))

    def flush(self, now: float) -> None:
        """Send the events since the last step, if there are any."""
        if self._events:
            self._send_all(StepTrace(now, events=self._events))

    def _send_all(self, trace: StepTrace) -> None:
        self._events, self._sequences = [], []  # the old ones are the socket thread's now
        for client_id in self.subscribers:
            self._send(client_id, trace)


def _event(request: Request, kind: EventType, timestamp: float) -> RequestEvent:
    return RequestEvent(request.number, request.request_id, kind, timestamp, request.num_prompt_tokens)
