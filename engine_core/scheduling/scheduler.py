"""The unified scheduler: no prefill phase and no decode phase, only sequences that catch up under one token budget.

`schedule()` takes the step's decisions in turn: whose turn it is, which requests to preempt until the others fit, which
to admit, how many tokens each computes. A request with one token to compute gets it. Prompts share the prefill budget,
so that a long one takes no more than its part of a step, and a short one that comes later does not wait for its end.
The decisions change nothing by themselves: `RequestLifecycle` carries them out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from quire.engine_core.executor import Executor
from quire.engine_core.feature import Feature, hooks
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.admission import Admission
from quire.engine_core.scheduling.batch import Batch, RunningRequests
from quire.engine_core.scheduling.fetches import Fetches, TierChoice
from quire.engine_core.scheduling.giving_way import Blocked, victims_for
from quire.engine_core.scheduling.lifecycle import RequestLifecycle
from quire.engine_core.scheduling.policies import POLICIES, Match
from quire.engine_core.scheduling.prefill_budget import PrefillRequest
from quire.engine_core.scheduling.prefix_match import PrefixMatcher
from quire.engine_core.scheduling.waiting import WaitingQueue
from quire.engine_core.scheduling.whole_prompts import prefill_budget_of
from quire.protocol.engine_shape import EngineShape

_MIN_PREFILLS = 4  # prompts in prefill before another has to wait for one of them, however small the steps
_ADMIT_SECONDS = 5e-4  # of a step, to order the waiting requests, and to start them: a burst delays no running request


class Scheduler:
    """Decides each step. Requests enter by `add` and leave by `remove`, whatever their state."""

    def __init__(
        self,
        executor: Executor,
        limits: EngineShape,
        clock: Callable[[], float] = time.monotonic,
        features: Sequence[Feature] = (),
        *,
        tiers: TierChoice = lambda _source: (),
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`tiers`: those of a request, see Fetches. `wake` is called, on any thread, when a fetch is done."""
        self.limits = limits
        self.starts_only_begun = False  # only requests that have begun may start, maybe again
        policy = POLICIES[limits.scheduling_policy]()
        self.admission = Admission(limits)
        self.prefill_budget = prefill_budget_of(limits)
        self._alone, self._may_share = hooks(features, Feature.choose_alone), hooks(features, Feature.may_share)
        self._extend = hooks(features, Feature.extend)
        self._sequences = executor.sequences
        self._clock = clock
        self._blocked: Blocked | None = None  # the request that could not start in the last step
        self._waits_for_pages = False  # that fetches hold: none can start before one of these is done
        waiting = WaitingQueue(policy, clock, self.admission.expected_tokens)
        self._requests = requests = RequestLifecycle(executor, limits, waiting, clock, features)
        self._prefixes = PrefixMatcher(executor.sequences, limits, policy)
        self.fetches = Fetches(executor.sequences, limits, tiers, self.prefill_budget, wake, clock)
        self.running, self.waiting, self.pins, self.counters = (
            requests.running, requests.waiting, requests.pins, requests.counters,
        )  # fmt: skip

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._requests.add(request)

    def release(self, request: Request) -> None:
        """Let a held request start from now on."""
        self._requests.release(request)

    def remove(self, request: Request) -> None:
        """Forget a request and give back what it holds; KeyError if it is not here."""
        self._requests.remove(request)
        self.fetches.forget(request)

    @property
    def has_requests(self) -> bool:
        """True if a step would have anything to do."""
        return bool(self.running) or (self.waiting.has_ready and not self._waits_for_pages)

    @property
    def has_begun_requests(self) -> bool:
        """True if a request has begun, even if it waits now."""
        return bool(self.running) or any(request.has_begun for request in self.waiting)

    @property
    def available_pages(self) -> int:
        """Pages that are free, or hold only what the prefix cache keeps."""
        return self._requests.available_pages

    def schedule(self) -> Batch:
        """Decide the next step and get its pages. Empty only if there are no requests, or none could start."""
        for request in self.fetches.take_ready():
            self.release(request)
        alone = next(filter(None, (choose(self.running) for choose in self._alone)), None)
        batch = self._schedule_all() if alone is None else self._schedule_alone(alone)
        batch.events = self._requests.take_events()
        self._waits_for_pages = not self.running and self.fetches.is_open
        return batch

    def _schedule_all(self) -> Batch:
        """Decide a step for all requests that may share one."""
        batch, running = Batch(), self._sort_running()
        if (preempted := self._preempt_until_it_fits(running.growing)) or self._give_way():
            running = self._sort_running()
        for request in running.growing:
            self._requests.reserve(request)
        max_cost = self.prefill_budget.max_cost(running.num_decode_rows, self.prefill_backlog(running.prefills))
        if self.waiting.has_ready and not preempted:
            running.add(self._sharing(self._admit(batch, running.prefills, max_cost)), self._sequences)
        self._fill(batch, running, max_cost)
        for extend in self._extend:
            extend(batch, self.prefill_budget, self.available_pages)
        return batch

    def learn(self, batch: Batch, seconds: float) -> None:
        """Learn from a step that has been computed in so many seconds."""
        self.prefill_budget.learn(batch.prefill_cost, batch.num_decode_rows, seconds)

    def _schedule_alone(self, request: Request) -> Batch:
        """Decide a step for a request alone, which takes no longer than a step with the others' tokens would."""
        batch, running = Batch(), RunningRequests.of([request], self._sequences)
        if self._preempt_until_it_fits(running.growing) and request not in self.running:
            return batch
        for each in running.growing:
            self._requests.reserve(each)
        num_decodes = RunningRequests.of(self.running, self._sequences).num_decode_rows
        self._fill(batch, running, self.prefill_budget.max_cost(num_decodes, self.prefill_backlog(running.prefills)))
        return batch

    def _sort_running(self) -> RunningRequests:
        return RunningRequests.of(self._sharing(self.running), self._sequences)

    def _sharing(self, running: Iterable[Request]) -> Iterable[Request]:
        """Return the running requests that may share a step."""
        for may_share in self._may_share:
            running = may_share(running)
        return running

    def prefill_backlog(self, prefills: Iterable[PrefillRequest]) -> int:
        """Return the prompt tokens left to compute that press for a larger budget.

        The longest prompt in prefill, or the next to start, does not count: it holds up no request, as its share of the
        budget lets the others by.
        """
        left = [prompt.num_new_tokens for prompt in prefills]
        following = [request.num_prompt_tokens for request in islice(self.waiting, 1)]
        return sum(left) + self.waiting.num_tokens - max(left + following, default=0)

    def pages_lacked(self, requests: Iterable[Request], steps: int = 1) -> int:
        """Return the KV pages that running requests lack for their next `steps` tokens each."""
        return sum([request.decoding.pages_lacked(request, steps) for request in requests])

    def _states_lacked(self, requests: Iterable[Request]) -> int:
        """Return the records of state that running requests lack for their next tokens."""
        if self._sequences.states is None:
            return 0
        return sum([request.decoding.states_lacked(request) for request in requests])

    def _fill(self, batch: Batch, running: RunningRequests, max_cost: float) -> None:
        """Give each decoding sequence a token; the prompts get what is left, at a cost of `max_cost` at most."""
        self.admission.decoded(running.num_decode_requests)
        tokens = self.limits.max_num_batched_tokens - running.num_decode_rows
        shares = self.prefill_budget.share(running.prefills, tokens, max_cost, self._clock())
        batch.prefill_cost = self.prefill_budget.cost(shares)
        batch.fill(running, shares)

    # Preemption

    def _preempt_until_it_fits(self, growing: Sequence[Request]) -> bool:
        """Preempt until these have pages for their next tokens; return True if any request was preempted."""
        has_room, pages, states = self._requests.has_room, self.pages_lacked(growing), self._states_lacked(growing)
        if has_room(pages, states) or (self._requests.free_idle_pages() and has_room(pages, states)):
            self.admission.stepped()
            return False
        now, before, counted = self._clock(), len(self.running), {*growing}
        victims = iter(sorted(self.running, key=self._cost_of_preemption))
        while not has_room(pages, states):
            victim = next(victims)
            if victim in counted:
                pages -= self.pages_lacked([victim])
                states -= self._states_lacked([victim])
            self._requests.preempt(victim, now)
        self.admission.preempted(before - len(self.running), self._requests.width)
        return True

    def _give_way(self) -> bool:
        """Preempt for the request that could not start in the last step, where others hold more than its tenant."""
        blocked, self._blocked = self._blocked, None
        if blocked is None or not blocked.request.can_start:
            return False
        victims = victims_for(blocked, self.running, self.waiting.precedes, self._cost_of_preemption)
        now = self._clock()
        for victim in victims:
            self._requests.preempt(victim, now)
            self.waiting.put_behind(victim, blocked.request)
        return bool(victims)

    def _cost_of_preemption(self, request: Request) -> tuple[int, int, int, int]:
        """Sort least important requests first; of these never preempted ones; of these those with the fewest pages."""
        private = sum(self._sequences.private_pages(slot) for slot in request.slots)
        return -request.message.priority, request.num_preemptions, private, -request.number

    # Admission

    def _admit(self, batch: Batch, prefills: Sequence[Request], max_cost: float) -> list[Request]:
        """Start waiting requests, in the queue's order, until one does not fit, or the time for it is up."""
        most = min(self.limits.max_num_seqs, self.admission.max_running, self.limits.max_num_batched_tokens)
        budget = self._chunk_budget(prefills, max_cost)
        width = self._requests.width
        if width >= most or budget <= 0:
            self._blocked = next((Blocked(each, width + each.width - most) for each in self.waiting.ready()), None)
            return []
        computing = {self._prefixes.page_in_progress(request) for request in prefills}
        to_grow = self.admission.pages_to_grow(self.running, self._sequences)
        admitted: list[Request] = []
        fetching: list[Request] = []
        for request in self._candidates(batch):
            if budget <= 0 or (self.running and width + request.width > most):
                self._blocked = Blocked(request, width + request.width - most)
                break
            if self.starts_only_begun and not request.has_begun:
                continue
            if not self._open(request, batch) or (match := self._prefixes.find(request, computing)) is None:
                continue
            now = self.limits.pages_for(request.num_tokens)
            growth = self.admission.projected_pages(request) - now
            needed = now - match.num_tokens // self.limits.block_size + match.cached_pages
            free = self.available_pages - self.admission.reserved_pages(to_grow + growth)
            if self.running and needed > free:
                self._blocked = Blocked(request, pages=needed - free)
                break
            if self.running and self._requests.lacks_states:
                self._blocked = Blocked(request, slots=request.width)
                break
            if match.source is None and self.fetches.begin(request, match.num_tokens):
                fetching.append(request)
                continue
            if (found := self._requests.start(request, match.source)) is None:
                break
            batch.num_cached_tokens += found if request.num_preemptions == 0 else 0
            width += request.width
            to_grow += growth
            budget -= self.prefill_budget.least_chunk(request) if prefills or admitted else 0
            admitted.append(request)
            computing.add(match.next_page)
        self.waiting.note_admitted(admitted)
        for request in admitted:
            self._requests.leave_queue(request)
        for request in fetching:
            self._requests.hold(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
        return admitted

    def _chunk_budget(self, prefills: Sequence[Request], max_cost: float) -> float:
        """Return the prompt tokens that new requests may count on, after a chunk for each prompt but the longest."""
        budget = min(max(max_cost, _MIN_PREFILLS * self.limits.tile), self.limits.max_num_batched_tokens)
        return budget - sum(sorted(map(self.prefill_budget.least_chunk, prefills))[:-1])

    def _candidates(self, batch: Batch) -> Iterator[Request]:
        """Yield the waiting requests in the queue's order: the first in any case, others while there is time."""
        matches: dict[Request, Match] = {}

        def match_of(request: Request) -> Match | None:
            late = matches and self._clock() > deadline
            if request not in matches and not late and self._open(request, batch):
                matches[request] = self._sequences.match(request.slot)
            return matches.get(request)

        deadline = self._clock() + _ADMIT_SECONDS
        arranged = self.waiting.arranged(match_of, self._sequences)
        deadline = self._clock() + _ADMIT_SECONDS
        for count, request in enumerate(arranged):
            if count and self._clock() > deadline:
                return
            yield request

    def _open(self, request: Request, batch: Batch) -> bool:
        if (error := self._requests.open(request)) is not None:
            batch.failed.append((request, error))
        return error is None
