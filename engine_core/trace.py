"""Traces of the steps, for the clients that have subscribed to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quire.engine_core.feature import Feature, Utility
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.batch import Batch
from quire.protocol.messages import (
    EventType,
    FinishReason,
    RequestEvent,
    SchedulerStats,
    SequenceTrace,
    StepTrace,
    UtilityCall,
)

MAX_SUBSCRIBERS = 16
"""Clients that may trace the steps at once."""


class Tracer(Feature):
    """Collects events until the step's `StepTrace` is sent, as long as there are subscribers.

    Each subscription ends with a trace that is marked as the `last`.
    """

    def __init__(self, send: Callable[[bytes, StepTrace], None], clock: Callable[[], float]) -> None:
        self.subscribers: dict[bytes, None] = {}
        self._send = send
        self._clock = clock
        self._requests: Iterable[Request] = ()
        self._events: list[RequestEvent] = []
        self._sequences: list[SequenceTrace] = []

    @property
    def utilities(self) -> Mapping[str, Utility]:
        """The calls that start and stop a trace."""
        return {"trace_start": self._start, "trace_stop": self._stop}

    def attach(self, requests: Iterable[Request]) -> None:
        """See Feature."""
        self._requests = requests

    def _start(self, client_id: bytes, _call: UtilityCall) -> None:
        """Subscribe a client, and send it the waiting requests; it sees the running ones in the next step."""
        if client_id not in self.subscribers and len(self.subscribers) >= MAX_SUBSCRIBERS:
            raise ValueError(
                f"{MAX_SUBSCRIBERS} clients are tracing this engine, and no more may; end one of them first"
            )
        self.subscribers[client_id] = None
        now = self._clock()
        events = [
            _event(request, EventType.PREEMPTED, now)
            if request.status is RequestStatus.PREEMPTED
            else _event(request, EventType.QUEUED, request.arrival)
            for request in sorted(self._requests, key=lambda request: request.number)
            if request.status is not RequestStatus.RUNNING
        ]
        self._send(client_id, StepTrace(now, events=events))

    def _stop(self, client_id: bytes, _call: UtilityCall) -> None:
        """End a subscription, if there is one; the client gets its last trace in any case."""
        now = self._clock()
        self._flush(now)
        self.forget(client_id)
        self._send(client_id, StepTrace(now, last=True))

    def forget(self, client_id: bytes) -> None:
        """Drop a client that is gone."""
        self.subscribers.pop(client_id, None)
        if not self.subscribers:
            self._events = []

    def add(self, request: Request) -> None:
        """Note that a request has arrived."""
        if self.subscribers:
            self._events.append(_event(request, EventType.QUEUED, request.arrival))

    def remove(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Note that a request has ended."""
        if self.subscribers:
            event = _event(request, EventType.FINISHED, now)
            event.finish_reason = reason
            self._events.append(event)

    def scheduled(self, batch: Batch) -> None:
        """Note the batch of the next step, before its requests move on. The beams of a search count as one."""
        if not self.subscribers:
            return
        for scheduled in batch.events:
            event = _event(scheduled.request, scheduled.type, scheduled.timestamp)
            event.num_cached_tokens = scheduled.num_cached_tokens
            self._events.append(event)
        self._sequences = [
            SequenceTrace(request.number, request.request_id, batch.step.starts[row], batch.step.counts[row])
            for request, row in zip(batch.requests, batch.rows, strict=True)
        ]

    def report(self, begun: float, batch: Batch, stats: SchedulerStats | None) -> None:
        """Send the trace of a step, or the events since the last one if it has computed nothing."""
        if not self.subscribers:
            return
        if stats is None:
            self._flush(begun)
            return
        for sequence, drafts, accepted in zip(self._sequences, batch.step.num_drafts, batch.accepted, strict=False):
            sequence.num_drafts, sequence.num_accepted = drafts, accepted
        self._send_all(StepTrace(begun, stats, self._sequences, self._events))

    def _flush(self, now: float) -> None:
        """Send the events since the last step, if there are any."""
        if self._events:
            self._send_all(StepTrace(now, events=self._events))

    def _send_all(self, trace: StepTrace) -> None:
        self._events, self._sequences = [], []  # the old ones are the socket thread's now
        for client_id in self.subscribers:
            self._send(client_id, trace)


def _event(request: Request, kind: EventType, timestamp: float) -> RequestEvent:
    return RequestEvent(request.number, request.request_id, kind, timestamp, request.num_prompt_tokens)
