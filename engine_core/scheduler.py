"""The unified scheduler: no prefill phase and no decode phase, only sequences that catch up under one token budget.

`schedule()` goes through the step's decisions in turn: who must give way so that the others have pages, who may start,
how many tokens each computes. Whoever has one token to compute gets it. Prompts share what `Pace` allows, so that a
long one takes no more than its part of a step, and a short one that comes later does not wait for its end.

Pages of KV memory are found by the tokens that they hold, also those of requests that still run. A request whose next
page another one is computing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine_core.admission import Admission
from quire.engine_core.executor import Executor
from quire.engine_core.limits import EngineLimits
from quire.engine_core.pace import Pace
from quire.engine_core.policies import POLICIES
from quire.engine_core.policies.base import Match
from quire.engine_core.request import NO_SLOT, Request, RequestStatus
from quire.engine_core.sequence import open_sequence
from quire.engine_core.waiting import WaitingQueue
from quire.protocol.messages import EventType

_OLDEST_SHARE = 4  # the oldest prompt gets one part of so many at least
_LEAST_PREFILLS = 4  # prompts in prefill before another has to wait for one of them, however small the steps

NextPage = tuple[str, int, tuple[int, ...]]
"""A page that is still to be computed: salt, the page before it or -1, and its tokens."""


@dataclass(slots=True)
class Batch:
    """What one step computes: `counts[i]` tokens of `requests[i]`."""

    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_decodes: int = 0
    num_cached_tokens: int = 0  # that those who start in this step need not compute
    failed: list[tuple[Request, str]] = field(default_factory=list)  # could not be opened; still to be released

    @property
    def slots(self) -> list[int]:
        """The executor's handle of each request."""
        return [request.slot for request in self.requests]

    @property
    def starts(self) -> list[int]:
        """The first position of each chunk."""
        return [request.num_computed_tokens for request in self.requests]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and those computed again after a preemption."""
        return sum(self.counts) - self.num_decodes


@dataclass(slots=True)
class Counters:
    """What has happened so far."""

    preemptions: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0  # of requests that have started
    wasted_tokens: int = 0  # computed again after a preemption


def share_tokens(
    prefills: Sequence[Request], oldest: Request, reserved: int, tokens: int, limits: EngineLimits
) -> list[tuple[Request, int]]:
    """How many of `tokens` each prompt gets: those with the fewest left first, but the oldest `reserved` at least.

    Chunks end with whole tiles where that is possible.
    """
    most = limits.long_prefill_threshold or tokens
    reserved = min(oldest.num_new_tokens, reserved, tokens, most)
    shares: list[tuple[Request, int]] = []
    for request in sorted(prefills, key=lambda request: (request.num_new_tokens, request.number)):
        if request is oldest:
            reserved = 0
        count = min(request.num_new_tokens, tokens - reserved, most)
        if limits.tile < count < request.num_new_tokens:
            count -= (request.num_computed_tokens + count) % limits.tile
        if count > 0:
            shares.append((request, count))
            tokens -= count
    return shares


class Scheduler:
    """Who runs, who waits. Requests enter by `add` and leave by `remove`, from whichever queue."""

    def __init__(self, executor: Executor, limits: EngineLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.policy = POLICIES[limits.policy]()
        self.running: dict[Request, None] = {}
        self.waiting = WaitingQueue(self.policy)
        self.admission = Admission(limits)
        self.pace = Pace(limits.tile)
        self.counters = Counters()
        self._owed = 0.0  # tokens that the oldest prompt is behind its share
        self._sequences = executor.sequences
        self._clock = clock
        self._num_added = 0

    @property
    def has_requests(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queues a request that `check_request` has accepted."""
        self._num_added += 1
        request.number = self._num_added
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forgets a request and gives back what it holds; KeyError if it is not here."""
        if request.status is RequestStatus.RUNNING:
            del self.running[request]
        else:
            self.waiting.remove(request)
        if request.slot != NO_SLOT:
            self._sequences.close(request.slot)
            request.slot = NO_SLOT

    def schedule(self) -> Batch:
        """Decides the next step and gets its pages. Empty only if there are no requests, or none could start."""
        batch = Batch()
        gave_way = self._make_room()
        if self.waiting and not gave_way:
            self._start_newcomers(batch)
        tokens = self.limits.max_num_batched_tokens
        prefills = []
        for request in self.running:
            if request.in_prefill:
                prefills.append(request)
            else:
                self._reserve(request)
                batch.requests.append(request)
                batch.counts.append(1)
        batch.num_decodes = len(batch.requests)
        self.admission.decoded(batch.num_decodes)
        tokens = min(tokens - batch.num_decodes, self._prefill_budget(prefills, batch.num_decodes))
        if prefills:
            for request, count in self._share(prefills, tokens):
                batch.requests.append(request)
                batch.counts.append(count)
        return batch

    # Who must give way

    def _make_room(self) -> bool:
        """Preempts until those who decode have pages for their next tokens; tells whether it had to."""
        lacking = self._pages_to_grow()
        if lacking <= self._available_pages():
            self.admission.stepped()
            return False
        now, before = self._clock(), len(self.running)
        while lacking > self._available_pages():
            victim = min(self.running, key=self._cost_of_preemption)
            lacking -= self._pages_lacked(victim)
            self._preempt(victim, now)
        self.admission.preempted(before - len(self.running), len(self.running))
        return True

    def _available_pages(self) -> int:
        return self._sequences.free_pages + self._sequences.cached_pages

    def _pages_to_grow(self) -> int:
        return sum(self._pages_lacked(request) for request in self.running)

    def _pages_lacked(self, request: Request) -> int:
        missing = request.num_tokens - request.num_reserved_tokens
        return self.limits.pages_for(missing) if missing > 0 else 0

    def _cost_of_preemption(self, request: Request) -> tuple[int, int, int, int]:
        """The least important first; of these who was never preempted; of these whose pages are the fewest."""
        private = self._sequences.private_pages(request.slot)
        return -request.priority, request.num_preemptions, private, -request.number

    def _preempt(self, request: Request, now: float) -> None:
        del self.running[request]
        self._sequences.release_pages(request.slot)
        request.forget_computed()
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.record(EventType.PREEMPTED, now)
        self.waiting.add(request)
        self.counters.preemptions += 1

    # Who may start

    def _start_newcomers(self, batch: Batch) -> None:
        """Starts those who wait, in the policy's order, until one of them finds no room."""
        room = min(self.limits.max_num_seqs, self.admission.max_running, self.limits.max_num_batched_tokens)
        prefills = [request for request in self.running if request.in_prefill]
        tokens = self._prefill_budget(prefills, len(self.running) - len(prefills))
        tokens = max(tokens, _LEAST_PREFILLS * self.limits.tile)
        tokens -= sum(min(request.num_new_tokens, self.limits.tile) for request in prefills)
        if len(self.running) >= room or tokens <= 0:
            return
        matches: dict[Request, Match] = {}

        def match_of(request: Request) -> Match | None:
            if request not in matches and self._open(request, batch):
                matches[request] = self._sequences.match(request.slot)
            return matches.get(request)

        computing = {self._page_in_work(request) for request in prefills}
        to_grow = self.admission.pages_to_grow(self.running)
        newcomers: list[Request] = []
        patient: set[Request] = set()  # another one computes their next page
        for request in self.policy.arrange(self.waiting, match_of, self._sequences):
            if len(self.running) >= room or tokens <= 0:
                break
            if not self._open(request, batch):
                continue
            found, cached, end = self._sequences.match(request.slot)
            page = self._next_page(request, found, end)
            if page is not None and page in computing:
                patient.add(request)
                continue
            projected = self.admission.projected_pages(request)
            now = self.limits.pages_for(request.num_tokens)
            needed = now - found // self.limits.page_size + cached
            reserved = int(self.admission.reserved_share * (to_grow + projected - now)) + self.admission.watermark
            if self.running and needed > self._available_pages() - reserved:
                break
            if not self._start(request, batch):
                break
            to_grow += projected - now
            tokens -= min(request.num_new_tokens, self.limits.tile)
            newcomers.append(request)
            computing.add(page)
        for request in newcomers:
            self.waiting.remove(request)
        if newcomers:
            self.policy.started(newcomers, patient)

    def _open(self, request: Request, batch: Batch) -> bool:
        if request.slot != NO_SLOT:
            return True
        try:
            request.slot = open_sequence(self._sequences, request)
        except ValueError as error:
            batch.failed.append((request, str(error)))
            return False
        return True

    def _next_page(self, request: Request, found: int, end: int) -> NextPage | None:
        """The first page of its prompt that is not computed yet; None if the prompt does not fill it."""
        tokens = request.prompt_token_ids[found : found + self.limits.page_size]
        if request.cache_salt is None or len(tokens) < self.limits.page_size:
            return None
        return request.cache_salt, end, tuple(tokens)

    def _page_in_work(self, request: Request) -> NextPage | None:
        found, _, end = self._sequences.match(request.slot)
        return self._next_page(request, found, end)

    def _start(self, request: Request, batch: Batch) -> bool:
        found = self._sequences.start(request.slot, request.num_tokens)
        if found is None:
            if not self.running:
                raise self._broken_promise(request)
            return False
        self.running[request] = None
        if request.status is RequestStatus.PREEMPTED:
            self.counters.wasted_tokens += max(0, request.num_lost_tokens - found)
        else:
            request.num_cached_tokens = found
            self.counters.cached_tokens += found
            self.counters.prompt_tokens += request.num_prompt_tokens
            batch.num_cached_tokens += found
        request.num_computed_tokens = found
        request.num_reserved_tokens = self.limits.pages_for(request.num_tokens) * self.limits.page_size
        request.status = RequestStatus.RUNNING
        request.record(EventType.SCHEDULED, self._clock())
        return True

    # How many tokens

    def _prefill_budget(self, prefills: Sequence[Request], num_decodes: int) -> int:
        """Tokens of prompts that the next step computes at most.

        The longest of those in prefill keeps nobody waiting whom its share would not let by: only the others press.
        """
        most = self.limits.max_num_batched_tokens
        if self.limits.long_prefill_threshold is not None:
            return most
        left = [request.num_new_tokens for request in prefills]
        backlog = sum(left) - max(left, default=0) + self.waiting.num_tokens
        return self.pace.prefill_tokens(most, num_decodes, backlog)

    def _share(self, prefills: Sequence[Request], tokens: int) -> list[tuple[Request, int]]:
        """Shares a step among prompts. Of steps too small to be divided, the oldest gets a whole one in its turn."""
        oldest = min(prefills, key=lambda request: request.number)
        tile = self.limits.tile
        self._owed += tokens / _OLDEST_SHARE
        shares = share_tokens(prefills, oldest, int(self._owed) // tile * tile, tokens, self.limits)
        self._owed = min(max(0.0, self._owed - dict(shares).get(oldest, 0)), float(tile))
        return shares

    def _reserve(self, request: Request) -> None:
        if request.num_tokens <= request.num_reserved_tokens:
            return
        if not self._sequences.reserve(request.slot, request.num_tokens):
            raise self._broken_promise(request)
        request.num_reserved_tokens = self.limits.pages_for(request.num_tokens) * self.limits.page_size

    def _broken_promise(self, request: Request) -> RuntimeError:
        return RuntimeError(
            f"request {request.request_id!r} was promised KV pages for {request.num_tokens} tokens, "
            f"but only {self._available_pages()} pages can be had"
        )
