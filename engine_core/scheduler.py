"""The unified scheduler: no prefill phase and no decode phase, only sequences that catch up under one token budget.

`schedule()` is a pipeline of decisions that change nothing but the budget they share (who must give way, who may
start, how many tokens each), and `_apply`, the one place that changes requests, queues and pages.

Order is first come, first served: `running` and then `waiting`, read one after the other, are in order of arrival.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.engine_core.executor import Executor
from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import NO_SLOT, Request, RequestStatus
from quire.protocol.messages import EventType


@dataclass(slots=True)
class Budget:
    """What one step has left to spend."""

    tokens: int
    sequences: int
    pages: int


@dataclass(slots=True)
class Batch:
    """What one step computes: `counts[i]` tokens of `requests[i]`."""

    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_decodes: int = 0
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


def count_staying(running: Sequence[Request], budget: Budget, limits: EngineLimits) -> int:
    """How many of `running`, the oldest, go on; the others give way so that there are pages for these."""
    for request in running:
        if request.num_tokens > request.num_reserved_tokens:
            budget.pages -= limits.pages_for(request.num_tokens - request.num_reserved_tokens)
    staying = len(running)
    while budget.pages < 0:
        staying -= 1
        budget.pages += limits.pages_for(max(running[staying].num_tokens, running[staying].num_reserved_tokens))
    budget.sequences -= staying
    return staying


def choose_newcomers(
    waiting: Iterable[Request], num_running: int, budget: Budget, limits: EngineLimits
) -> list[Request]:
    """Who starts now: in order, while there are pages for all of its tokens, and a spare one for each that runs beside.

    The spare pages let those who run grow for a while, so that a newcomer is not sent back at once. The token budget
    is only looked at here; `share_tokens` spends it.
    """
    newcomers: list[Request] = []
    tokens = budget.tokens
    for request in waiting:
        pages = limits.pages_for(request.num_tokens)
        if tokens <= 0 or budget.sequences == 0 or pages + num_running + len(newcomers) > budget.pages:
            break
        newcomers.append(request)
        tokens -= request.num_new_tokens
        budget.sequences -= 1
        budget.pages -= pages
    return newcomers


def share_tokens(requests: Iterable[Request], budget: Budget, batch: Batch) -> None:
    """Gives each in turn what it lacks, the last of them what is left.

    There is a token for each: nobody starts in a step that has none left, and only the last can lack more than one.
    """
    for request in requests:
        count = request.num_tokens - request.num_computed_tokens
        if count == 1 and request.num_computed_tokens >= len(request.prompt_token_ids):
            batch.num_decodes += 1
        elif count > budget.tokens:
            count = budget.tokens
        batch.requests.append(request)
        batch.counts.append(count)
        budget.tokens -= count


class Scheduler:
    """Who runs, who waits. Requests enter by `add` and leave by `remove`, from whichever queue, each O(1)."""

    def __init__(self, executor: Executor, limits: EngineLimits) -> None:
        self.limits = limits
        self.running: dict[Request, None] = {}
        # Not a dict: requests leave at the front, where a dict walks over the gaps, and preempted ones enter there.
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.num_preemptions = 0
        self._executor = executor

    @property
    def has_requests(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queues a request that `check_request` has accepted."""
        self.waiting[request] = None

    def remove(self, request: Request) -> None:
        """Forgets a request; KeyError if it is not here."""
        del (self.running if request.status is RequestStatus.RUNNING else self.waiting)[request]

    def schedule(self) -> Batch:
        """Decides the next step and gets its pages. Empty only if there are no requests, or none could start."""
        limits = self.limits
        budget = Budget(limits.max_num_batched_tokens, limits.max_num_seqs, self._executor.free_pages)
        batch = Batch()
        running = list(self.running)
        staying = count_staying(running, budget, limits)
        share_tokens(running[:staying], budget, batch)
        leaving = running[staying:]
        newcomers = [] if leaving else choose_newcomers(self.waiting, staying, budget, limits)
        opened = self._apply(leaving, newcomers, batch)
        share_tokens(opened, budget, batch)
        return batch

    def _apply(self, leaving: list[Request], newcomers: list[Request], batch: Batch) -> list[Request]:
        """Carries the decisions out, `batch` having those who stay; returns the newcomers that could start."""
        now = time.monotonic()
        for request in reversed(leaving):  # the newest first, so that the oldest is the first to come back
            self._preempt(request, now)
        for request in batch.requests:
            if request.num_tokens > request.num_reserved_tokens:
                self._reserve(request)
        for request in newcomers:
            self._start(request, now, batch)
        return [request for request in newcomers if request.status is RequestStatus.RUNNING]

    def _preempt(self, request: Request, now: float) -> None:
        del self.running[request]
        self._executor.release_pages(request.slot)
        request.forget_computed()
        request.status = RequestStatus.PREEMPTED
        request.record(EventType.PREEMPTED, now)
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)
        self.num_preemptions += 1

    def _start(self, request: Request, now: float, batch: Batch) -> None:
        try:
            if request.slot == NO_SLOT:
                request.slot = self._executor.open(request)
        except ValueError as error:
            batch.failed.append((request, str(error)))
            return
        del self.waiting[request]
        self.running[request] = None
        request.status = RequestStatus.RUNNING
        request.record(EventType.SCHEDULED, now)
        self._reserve(request)

    def _reserve(self, request: Request) -> None:
        if not self._executor.reserve(request.slot, request.num_tokens):
            raise RuntimeError(
                f"request {request.request_id!r} was promised KV pages for {request.num_tokens} tokens, "
                f"but only {self._executor.free_pages} pages are free"
            )
        request.num_reserved_tokens = self.limits.pages_for(request.num_tokens) * self.limits.page_size
