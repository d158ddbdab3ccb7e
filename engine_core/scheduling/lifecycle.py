"""The lifecycle of requests: the one place that moves them between the queues, and takes and gives back their pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine_core.executor import Executor
from quire.engine_core.feature import Feature, hooks
from quire.engine_core.request import NO_SLOT, Request, RequestStatus
from quire.engine_core.scheduling.batch import ScheduleEvent
from quire.engine_core.scheduling.pins import Pins
from quire.engine_core.scheduling.waiting import WaitingQueue
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EventType


@dataclass(slots=True)
class ScheduleCounters:
    """Counts since the engine's start."""

    preemptions: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0  # prompt tokens of all requests that have started
    wasted_tokens: int = 0  # tokens that were computed again after a preemption


class RequestLifecycle:
    """The waiting and the running requests. Requests enter by `add` and leave by `remove`, whatever their state."""

    def __init__(
        self,
        executor: Executor,
        limits: EngineShape,
        waiting: WaitingQueue,
        clock: Callable[[], float],
        features: Sequence[Feature] = (),
    ) -> None:
        self.running: dict[Request, int] = {}  # in order of start, with the tokens that each had then
        self.waiting = waiting
        self.pins = Pins(executor.sequences)
        self.counters = ScheduleCounters()
        self._executor = executor
        self._sequences = executor.sequences
        self._limits = limits
        self._clock = clock
        self._free_idle_pages = [self.pins.unpin_all, *hooks(features, Feature.free_idle_pages)]
        self._events: list[ScheduleEvent] = []
        self._num_added = 0
        self._num_lost: dict[Request, int] = {}  # tokens of preempted requests, some of which are computed again

    @property
    def available_pages(self) -> int:
        """Pages that are free, or hold only what the prefix cache keeps."""
        return self._sequences.free_pages + self._sequences.cached_pages

    @property
    def available_states(self) -> int:
        """Records of state that are free or cached; 0 if the model has no state."""
        states = self._sequences.states
        return 0 if states is None else states.free_records + states.cached_records

    @property
    def lacks_states(self) -> bool:
        """True if no sequence can start before another gives its record of state back."""
        return self._limits.num_states > 0 and self.available_states == 0

    def has_room(self, pages: int, states: int = 0) -> bool:
        """Return True if so many pages and records of state are available."""
        return pages <= self.available_pages and states <= self.available_states

    @property
    def width(self) -> int:
        """Sequences that the running requests may have."""
        return sum([request.decoding.width for request in self.running])

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._num_added += 1
        request.number = self._num_added
        if request.status is not RequestStatus.WAITING:
            self.waiting.hold(request)
        else:
            self._wait(request)

    def hold(self, request: Request, status: RequestStatus) -> None:
        """Keep a waiting request from starting until it is released."""
        self.waiting.remove(request)
        request.status = status
        self.waiting.hold(request)

    def release(self, request: Request) -> None:
        """Let a held request start from now on. It has kept its place by its arrival."""
        self.waiting.remove(request)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Forget a request and give back what it holds; KeyError if it is not here."""
        if request.status is RequestStatus.RUNNING:
            del self.running[request]
        else:
            self.waiting.remove(request)
        self.waiting.forget(request)
        self._num_lost.pop(request, None)
        if (successor := request.decoding.leave(request)) is not None:
            self._transfer_pages(request, successor)
        request.decoding.close(request)

    def open(self, request: Request) -> str | None:
        """Open a request's sequence, if it has none yet; return the error if the executor rejects it."""
        if request.slot == NO_SLOT:
            try:
                request.slot = request.decoding.open(request)
            except ValueError as error:
                return str(error)
        return None

    def start(self, request: Request, source: Request | None) -> int | None:
        """Start an open request that stays in the queue until `leave_queue`; return how many tokens are cached.

        They come from `source`, if there is one, else from the prefix cache. None, and nothing has changed, if there
        are too few pages.
        """
        if source is not None:
            found = self._fork(request, source)
        else:
            found = self._sequences.start(request.slot, request.num_tokens)
            if found is None and not self.running and self.free_idle_pages():
                found = self._sequences.start(request.slot, request.num_tokens)
        if found is not None:
            self._run(request, found)
        elif (self.available_pages, self.available_states) == (self._limits.num_pages, self._limits.num_states):
            raise self._lacks_promised_pages(request)
        return found

    def free_idle_pages(self) -> bool:
        """Let the pages go that are held for no request; return True if there were any."""
        freed = [free_idle_pages() for free_idle_pages in self._free_idle_pages]  # each of them
        return any(freed)

    def leave_queue(self, request: Request) -> None:
        """Take a request that has started out of the waiting queue."""
        self.waiting.start(request)

    def preempt(self, request: Request, now: float) -> None:
        """Take a running request's pages and queue it again."""
        del self.running[request]
        self._num_lost[request] = request.decoding.preempt(request)
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.record(EventType.PREEMPTED, now)
        self._events.append(ScheduleEvent(request, EventType.PREEMPTED, now))
        self._wait(request)
        self.counters.preemptions += 1

    def reserve(self, request: Request) -> None:
        """Get the pages for a running request's next tokens, which the scheduler has made available."""
        if not request.decoding.reserve(request, self._executor):
            raise self._lacks_promised_pages(request)

    def take_events(self) -> list[ScheduleEvent]:
        """Remove and return the events since the last call, without those of requests that have ended since."""
        events, self._events = self._events, []
        return [event for event in events if not event.request.is_finished]

    def _wait(self, request: Request) -> None:
        self.waiting.add(request)
        request.decoding.queue(request)

    def _fork(self, request: Request, source: Request) -> int | None:
        """Give a request what `source` has computed of its prompt; return how many tokens need not be computed."""
        done = self._executor.fork(request.slot, source.slot, request.num_forked_tokens, request.num_tokens)
        return request.num_computed_tokens if done else None

    def _transfer_pages(self, source: Request, successor: Request) -> None:
        """Start a waiting request in the place of one that ends, if it can; else the prompt is computed again."""
        if self.open(successor) is not None or self._sequences.match(successor.slot)[0] >= successor.num_forked_tokens:
            return
        if (found := self._fork(successor, source)) is not None:
            self._run(successor, found)
            self.waiting.start(successor)

    def _run(self, request: Request, found: int) -> None:
        """Let a request run from now on; it has pages for its tokens, of which `found` are computed."""
        self.running[request] = request.num_tokens
        request.decoding.begin(request)
        if request.status is RequestStatus.PREEMPTED:
            self.counters.wasted_tokens += max(0, self._num_lost.pop(request) - found)
        else:
            request.num_cached_tokens = found
            self.counters.cached_tokens += found
            self.counters.prompt_tokens += request.num_prompt_tokens
        request.status = RequestStatus.RUNNING
        now = self._clock()
        request.record(EventType.SCHEDULED, now)
        self._events.append(ScheduleEvent(request, EventType.SCHEDULED, now, found))

    def _lacks_promised_pages(self, request: Request) -> RuntimeError:
        return RuntimeError(
            f"request {request.request_id!r} was promised KV pages for {request.num_tokens} tokens, "
            f"but only {self.available_pages} pages and {self.available_states} records of state are available"
        )
