"""The unified scheduler: no prefill phase and no decode phase, only sequences that catch up under one token budget.

`schedule()` goes through the step's decisions in turn: who must give way so that the others have pages, who may start,
how many tokens each computes. Whoever has one token to compute gets it. Prompts share what `Pace` allows, so that a
long one takes no more than its part of a step, and a short one that comes later does not wait for its end.

Pages of KV memory are found by the tokens that they hold, also those of requests that still run. A request whose next
page another one is computing waits for it. Siblings, which have the same prompt, share also the page that the
prompt does not fill: each gets a copy when it forks from one that has computed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.decoding.sequence import open_sequence
from quire.engine_core.executor import Executor
from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import NO_SLOT, Request, RequestStatus
from quire.engine_core.scheduling.admission import Admission
from quire.engine_core.scheduling.batch import Batch, Move
from quire.engine_core.scheduling.pace import Pace
from quire.engine_core.scheduling.pins import Pins
from quire.engine_core.scheduling.policies import POLICIES
from quire.engine_core.scheduling.policies.base import Match
from quire.engine_core.scheduling.roster import Roster
from quire.engine_core.scheduling.waiting import WaitingQueue
from quire.protocol.messages import EventType

_LEAST_PREFILLS = 4  # prompts in prefill before another has to wait for one of them, however small the steps
_STARTING_SECONDS = 5e-4  # of a step, to arrange those who wait, and to start them: a crowd delays nobody who runs

NextPage = tuple[str, int, tuple[int, ...]]
"""A page that is still to be computed: salt, the page before it or -1, and its tokens."""


class Beginning(NamedTuple):
    """What a request that starts need not compute, and from where it gets it: the prefix cache, or a sibling."""

    found: int  # tokens
    cached_pages: int = 0  # of those that hold them, the ones that nobody has
    next_page: NextPage | None = None  # that it is going to compute
    source: Request | None = None


@dataclass(slots=True)
class Counters:
    """What has happened so far."""

    preemptions: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0  # of requests that have started
    wasted_tokens: int = 0  # computed again after a preemption


class Scheduler:
    """Who runs, who waits. Requests enter by `add` and leave by `remove`, from whichever queue."""

    def __init__(self, executor: Executor, limits: EngineLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.policy = POLICIES[limits.scheduling_policy]()
        self.running: dict[Request, None] = {}
        self.waiting = WaitingQueue(self.policy)
        self.admission = Admission(limits)
        self.pace = Pace(limits)
        self.counters = Counters()
        self._executor = executor
        self._sequences = executor.sequences
        self.pins = Pins(executor.sequences)
        self._clock = clock
        self._moves: list[Move] = []  # since the last step
        self._num_added = 0

    @property
    def has_requests(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.running) or self.waiting.has_ready

    def add(self, request: Request) -> None:
        """Queues a request that `check_request` has accepted."""
        self._num_added += 1
        request.number = self._num_added
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.waiting.hold(request)
        else:
            self._wait(request)

    def let_start(self, request: Request) -> None:
        """From now on a request that has been held back may start. It has kept its place by its arrival."""
        self.waiting.remove(request)
        request.status = RequestStatus.WAITING
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Forgets a request and gives back what it holds; KeyError if it is not here."""
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
            if request.siblings is not None and (heir := request.siblings.heir_of(request)) is not None:
                self._inherit(heir, request)
        else:
            self._stop_waiting(request)
        self._close(request)

    def _close(self, request: Request) -> None:
        for slot in request.slots:
            self._sequences.close(slot)
        request.slot = NO_SLOT

    def _wait(self, request: Request) -> None:
        self.waiting.add(request)
        if request.siblings is not None:
            request.siblings.waiting[request] = None

    def _stop_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.siblings is not None:
            request.siblings.waiting.pop(request, None)

    def _stop_running(self, request: Request) -> None:
        del self.running[request]
        if request.siblings is not None:
            del request.siblings.running[request]

    def schedule(self) -> Batch:
        """Decides the next step and gets its pages. Empty only if there are no requests, or none could start."""
        batch, roster = Batch(), Roster.of(self.running)
        if gave_way := self._make_room(roster.growing):
            roster = Roster.of(self.running)
        for request in roster.growing:
            self.reserve(request)
        budget = self.prefill_budget(roster)
        if self.waiting.has_ready and not gave_way:
            roster.add(self._start_newcomers(batch, roster.prefills, budget))
        self._fill(batch, roster, budget)
        # Who has ended since then is not told of again.
        batch.moves = [move for move in self._moves if not move.request.status.is_finished]
        self._moves.clear()
        return batch

    def _fill(self, batch: Batch, roster: Roster, budget: float) -> None:
        """A token for each that decodes; the prompts get what is left, at a cost of `budget` at most."""
        batch.num_decodes = roster.num_decodes
        self.admission.decoded(len(roster.decodes) + len(roster.searches))
        shares = self.pace.share(roster.prefills, self.limits.max_num_batched_tokens - batch.num_decodes, budget)
        prompts, counts = [request for request, _ in shares], [count for _, count in shares]
        batch.prefill_cost = self.pace.prefill_cost(shares)
        batch.requests = roster.decodes + prompts
        batch.counts = [1] * len(roster.decodes) + counts
        for request in roster.searches:
            batch.add_search(request)

    # Who must give way

    def _make_room(self, growing: Sequence[Request]) -> bool:
        """Preempts until these have pages for their next tokens; tells whether it had to."""
        lacking = sum(self._pages_lacked(request) for request in growing)
        if lacking <= self.available_pages or (self.pins.unpin_all() and lacking <= self.available_pages):
            self.admission.stepped()
            return False
        now, before = self._clock(), len(self.running)
        victims = iter(sorted(self.running, key=self._cost_of_preemption))
        while lacking > self.available_pages:
            victim = next(victims)
            lacking -= self._pages_lacked(victim)
            self._preempt(victim, now)
        self.admission.preempted(before - len(self.running), self._width())
        return True

    def _width(self) -> int:
        """Sequences of those that run."""
        return sum(1 if request.search is None else request.width for request in self.running)

    @property
    def available_pages(self) -> int:
        """Those that are free, or hold only what the prefix cache keeps."""
        return self._sequences.free_pages + self._sequences.cached_pages

    def _pages_lacked(self, request: Request) -> int:
        missing = request.num_tokens - request.num_reserved_tokens
        pages = self.limits.pages_for(missing) if missing > 0 else 0
        if request.search is None:
            return pages
        num_kept = len(request.slots)
        to_fork = self.limits.pages_for(request.num_tokens) - request.num_computed_tokens // self.limits.block_size
        return num_kept * pages + (len(request.search.live) - num_kept) * to_fork

    def _cost_of_preemption(self, request: Request) -> tuple[int, int, int, int]:
        """The least important first; of these who was never preempted; of these whose pages are the fewest."""
        private = sum(self._sequences.private_pages(slot) for slot in request.slots)
        return -request.priority, request.num_preemptions, private, -request.number

    def _preempt(self, request: Request, now: float) -> None:
        self._stop_running(request)
        if request.search is None:
            self._sequences.release_pages(request.slot)
        else:
            self._close(request)
        request.forget_computed()
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.record(EventType.PREEMPTED, now)
        self._moves.append(Move(request, EventType.PREEMPTED, now))
        self._wait(request)
        self.counters.preemptions += 1

    # Who may start

    def _start_newcomers(self, batch: Batch, prefills: Sequence[Request], budget: float) -> list[Request]:
        """Starts those who wait, in the policy's order, until one of them finds no room, or the time for that is up."""
        room = min(self.limits.max_num_seqs, self.admission.max_running, self.limits.max_num_batched_tokens)
        budget = min(max(budget, _LEAST_PREFILLS * self.limits.tile), self.limits.max_num_batched_tokens)
        budget -= sum(sorted(self._least_chunk(request) for request in prefills)[:-1])  # the longest leaves room
        width = self._width()
        if width >= room or budget <= 0:
            return []
        matches: dict[Request, Match] = {}

        def match_of(request: Request) -> Match | None:
            late = matches and self._clock() > deadline  # the first one is looked at in any case
            if request not in matches and not late and self._open(request, batch):
                matches[request] = self._sequences.match(request.slot)
            return matches.get(request)

        computing = {self._page_in_work(request) for request in prefills}
        to_grow = self.admission.pages_to_grow(self.running)
        newcomers: list[Request] = []
        deadline = self._clock() + _STARTING_SECONDS
        arranged = self.policy.arrange(self.waiting.ready(), match_of, self._sequences)
        deadline = self._clock() + _STARTING_SECONDS
        for count, request in enumerate(arranged):
            is_full = bool(self.running) and width + request.width > room
            if is_full or budget <= 0 or (count and self._clock() > deadline):
                break
            if not self._open(request, batch):
                continue
            if (beginning := self._beginning(request, computing)) is None:
                continue
            projected = self.admission.projected_pages(request)
            now = self.limits.pages_for(request.num_tokens)
            needed = now - beginning.found // self.limits.block_size + beginning.cached_pages
            reserved = int(self.admission.reserved_share * (to_grow + projected - now)) + self.admission.watermark
            if self.running and needed > self.available_pages - reserved:
                break
            if not self._start(request, batch, beginning.source):
                break
            width += request.width
            to_grow += projected - now
            budget -= self._least_chunk(request) if prefills or newcomers else 0
            newcomers.append(request)
            computing.add(beginning.next_page)
        for request in newcomers:
            self._stop_waiting(request)
        if newcomers:
            self.policy.started(newcomers)
        return newcomers

    def _least_chunk(self, request: Request) -> int:
        return min(request.num_new_tokens, self.limits.tile)

    def _open(self, request: Request, batch: Batch) -> bool:
        if request.slot != NO_SLOT:
            return True
        try:
            request.slot = open_sequence(self._sequences, request)
        except ValueError as error:
            batch.failed.append((request, str(error)))
            return False
        return True

    def _beginning(self, request: Request, computing: set[NextPage | None]) -> Beginning | None:
        """What `request` would start with now; None if it should wait for what another one is computing."""
        may_wait = self.policy.may_wait(request) and not request.needs_every_token
        found, cached, end = self._sequences.match(request.slot)
        source = None if request.siblings is None else request.siblings.source_of(request)
        if source is not None and request.num_shared_tokens > found:
            if source.has_computed_for(request):
                return Beginning(request.num_shared_tokens, source=source)
            if may_wait:
                return None
        page = self._next_page(request, found, end)
        return None if may_wait and page is not None and page in computing else Beginning(found, cached, page)

    def _next_page(self, request: Request, found: int, end: int) -> NextPage | None:
        """The first page of its prompt that is not computed yet; None if the prompt does not fill it."""
        tokens = request.prompt_token_ids[found : found + self.limits.block_size]
        if request.cache_salt is None or len(tokens) < self.limits.block_size:
            return None
        return request.cache_salt, end, tuple(tokens)

    def _page_in_work(self, request: Request) -> NextPage | None:
        return self._next_page(request, *self._sequences.shared(request.slot))

    def _start(self, request: Request, batch: Batch, source: Request | None) -> bool:
        found: int | None
        if source is None:
            found = self._sequences.start(request.slot, request.num_tokens)
            if found is None and not self.running and self.pins.unpin_all():
                found = self._sequences.start(request.slot, request.num_tokens)
        else:
            found = request.num_shared_tokens if self._fork(request, source) else None
        if found is None:
            if not self.running:
                raise self._broken_promise(request)
            return False
        self._run(request, found)
        batch.num_cached_tokens += found if request.num_preemptions == 0 else 0
        return True

    def _fork(self, request: Request, source: Request) -> bool:
        return self._executor.fork(request.slot, source.slot, request.num_shared_tokens, request.num_tokens)

    def _inherit(self, request: Request, source: Request) -> None:
        """Starts one that waits in the place of its sibling that ends, if it can; else the prompt is computed again."""
        if (
            request.width > source.width
            or not self._open(request, Batch())
            or self._sequences.match(request.slot)[0] >= request.num_shared_tokens
        ):
            return
        if self._fork(request, source):
            self._stop_waiting(request)
            self._run(request, request.num_shared_tokens)

    def _run(self, request: Request, found: int) -> None:
        """From now on it runs; it has pages for its tokens, of which `found` are computed."""
        self.running[request] = None
        if request.siblings is not None:
            request.siblings.running[request] = None
        if request.search is not None:
            request.search.begin(request.slot)
        if request.status is RequestStatus.PREEMPTED:
            self.counters.wasted_tokens += max(0, request.num_lost_tokens - found)
        else:
            request.num_cached_tokens = found
            self.counters.cached_tokens += found
            self.counters.prompt_tokens += request.num_prompt_tokens
        request.num_computed_tokens = found
        request.num_reserved_tokens = self.limits.pages_for(request.num_tokens) * self.limits.block_size
        request.status = RequestStatus.RUNNING
        now = self._clock()
        request.record(EventType.SCHEDULED, now)
        self._moves.append(Move(request, EventType.SCHEDULED, now, found))

    # How many tokens

    def prefill_budget(self, roster: Roster) -> float:
        """What the prompts of the next step may cost.

        The longest of those in prefill, or the next one that starts, keeps nobody waiting whom its share would not let
        by: only the others press.
        """
        left = [request.num_new_tokens for request in roster.prefills]
        following = [request.num_prompt_tokens for request in islice(self.waiting, 1)]
        backlog = sum(left) + self.waiting.num_tokens - max(left + following, default=0)
        return self.pace.budget(roster.num_decodes, backlog)

    def reserve(self, request: Request) -> None:
        """Gets the pages that it was promised for its tokens."""
        if request.search is not None:
            self._reserve_beams(request, request.search)
        elif not self._sequences.reserve(request.slot, request.num_tokens):
            raise self._broken_promise(request)
        request.num_reserved_tokens = self.limits.pages_for(request.num_tokens) * self.limits.block_size

    def _reserve_beams(self, request: Request, search: BeamSearch) -> None:
        """Pages for the next token of each beam, and a sequence for those that have none yet."""
        for beam in search.live:
            if beam.slot is None:
                source = beam.source
                tokens = [*self._sequences.tokens(source)[:-1], beam.token_id]
                beam.slot = beam.source = open_sequence(self._sequences, request, tokens)
                done = self._executor.fork(beam.slot, source, request.num_computed_tokens, request.num_tokens)
            else:
                done = self._sequences.reserve(beam.slot, request.num_tokens)
            if not done:
                raise self._broken_promise(request)

    def _broken_promise(self, request: Request) -> RuntimeError:
        return RuntimeError(
            f"request {request.request_id!r} was promised KV pages for {request.num_tokens} tokens, "
            f"but only {self.available_pages} pages can be had"
        )
