"""Extends the decoding sequences of a step by drafts, as far as these pay, and learns from what became of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.engine_core.averages import blend
from quire.engine_core.feature import Feature
from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.prefill_budget import PrefillBudget
from quire.engine_core.speculation.costs import DraftCosts
from quire.engine_core.speculation.progress import DraftGain, Progress
from quire.engine_core.speculation.proposer import MOST_COPIED, NoDrafts, Proposer
from quire.kernels.runner import Sequences
from quire.kernels.step import Branch
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import FinishReason
from quire.protocol.totals import DraftTotals, EngineTotals

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Speculation(Feature):
    """Drafts for the requests that decode one sequence.

    Each step computes drafts after a request's last token. The target samples at each of these positions what it would
    sample without drafts, and they are kept as far as they agree; so they change no token. How many there are follows
    from the acceptance probability of each (`Proposer`) and its cost (`DraftCosts`).
    """

    def __init__(
        self,
        proposer: Proposer,
        sequences: Sequences,
        max_drafts: int,
        limits: EngineShape,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_adaptive: bool = True,
        set_observed: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Draft for `sequences`, as much as pays, or as much as can be.

        `set_observed` is called with whether the proposer observes the next steps, when that changes.
        """
        self.totals = DraftTotals(accepted_per_position=[0] * max_drafts)
        self._proposer = proposer
        self._sequences = sequences
        self._max_drafts = max_drafts
        self._limits = limits
        self._clock = clock
        self._is_adaptive = is_adaptive
        self._set_observed = set_observed
        self._costs = DraftCosts(keeps=proposer.observes)
        self._observes = proposer.observes  # the step that comes next, or was the last
        self._progress = Progress()
        self._num_running = 0  # requests of the last step
        self._rest = self._resting_decodes = 0  # steps for which drafts pause, and their decoding sequences
        self._extend_seconds = 0.0  # of this step
        self._prompt_token_seconds = 0.0  # that a token takes beside prompts
        self._observe_seconds = 0.0  # of a step that decodes
        self._forcing: set[Request] = set()  # constrained requests of whose grammars no token may be skipped
        self._forced_slots: set[int] = set()  # of this step: their drafts are forced tokens

    def extend(self, batch: Batch, budget: PrefillBudget, free_pages: int) -> None:
        """Add drafts to a batch; `free_pages` can be had, one of which each sequence may need for its next token."""
        self._extend_seconds = 0.0
        self._forced_slots = set()
        self._num_running = len(batch.requests)
        is_resting = self._rest > 0
        if is_resting:
            self._rest = self._rest - 1 if batch.num_decode_rows == self._resting_decodes else 0
        observes = not is_resting and self._is_observed(batch)
        if observes is not self._observes:
            self._observes = observes
            self._set_observed(observes)
        if is_resting:
            return
        asks = not self._proposer.is_idle and self._allows(batch.num_decode_rows)
        count = batch.num_single_decodes
        room = self._limits.max_num_batched_tokens - sum(batch.step.counts)
        if not (asks or self._forcing) or not count or room < count or free_pages < 2 * len(batch.step.slots):
            return
        begun = self._clock()
        self._prompt_token_seconds = budget.token_seconds
        requests, most = batch.requests[:count], min(self._max_drafts, room // count)
        bounds = [
            min(most, request.stop.token_limit - request.num_tokens - 1) if request.decoding.takes_spans else 0
            for request in requests
        ]
        drafts, branches = self._force(requests, bounds), list[Branch]()
        least = self._least_probability(batch) if asks else math.inf
        if least < 1:
            drafts = list(map(max, drafts, self._propose(requests, bounds, least)))
            branches = self._branches(requests, drafts, least, room - sum(drafts))
        if any(drafts):
            batch.add_drafts(drafts, branches)
        self._extend_seconds = self._clock() - begun

    def end_step(self, batch: Batch, seconds: float | None) -> None:
        """Learn from a step, unless it took several attempts, and count its drafts."""
        if seconds is None or self._rest or (self._proposer.is_idle and not batch.step.num_drafts):
            return
        begun = self._clock()
        num_drafts, gain = self._learn_drafts(batch) if batch.step.num_drafts else (0, DraftGain())
        num_decodes = batch.num_decode_rows
        is_decoding = num_decodes > 0 and not batch.prefill_cost
        if self._observes:
            self._ask(lambda proposer: proposer.observe(batch), None)
            if is_decoding:
                self._observe_seconds = blend(self._observe_seconds, self._clock() - begun)
        own_seconds = self._clock() - begun
        seconds, own_seconds = seconds + own_seconds, self._extend_seconds + own_seconds
        self._extend_seconds = 0.0
        if is_decoding:
            self._costs.learn(num_decodes, num_drafts, gain, seconds, own_seconds, keeps=self._observes)
        else:
            self._costs.learn_beside_prompts(num_decodes, num_drafts, gain, self._prompt_token_seconds, own_seconds)
        if self._is_adaptive and not self._forcing and not self._observes:
            self._rest, self._resting_decodes = self._costs.rest(num_decodes), num_decodes

    def _learn_drafts(self, batch: Batch) -> tuple[int, DraftGain]:
        """Learn which drafts were accepted; return the number of tokens computed for drafts, and the gain."""
        totals, num_accepted = self.totals, sum(batch.accepted)
        rows = [row for row, number in enumerate(batch.step.num_drafts) if number]
        totals.drafts += len(rows)
        totals.draft_tokens += sum(batch.step.num_drafts)
        totals.accepted_tokens += num_accepted
        for row in rows:
            for position in range(batch.accepted[row]):
                totals.accepted_per_position[position] += 1
        slots, starts = batch.step.slots, batch.step.starts
        sampled = [
            row
            for row in rows
            if batch.requests[row].num_tokens > starts[row] + 1 and slots[row] not in self._forced_slots
        ]
        slots, accepted = [slots[row] for row in sampled], [batch.accepted[row] for row in sampled]
        self._ask(lambda proposer: proposer.learn(slots, accepted), None)
        return sum(batch.step.num_drafts) + batch.num_branch_tokens, self._progress.gain_of(batch)

    def _force(self, requests: Sequence[Request], bounds: list[int]) -> list[int]:
        """Draft what grammars force where it is sampled token by token, and allow no other drafts there."""
        counts = [0] * len(requests)
        for index, request in enumerate(requests) if self._forcing else ():
            forced = request.constraint.forced[: bounds[index]] if request.constraint is not None else []
            if forced and self._sequences.reserve(request.slot, request.num_tokens + len(forced)):
                for token in forced:
                    self._sequences.append(request.slot, token)
                counts[index], bounds[index] = len(forced), 0
                self._forced_slots.add(request.slot)
        return counts

    def _propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """Return the numbers of drafts, without those that grammars do not allow."""
        counts = self._ask(lambda proposer: proposer.propose(requests, most, least), list[int]())
        if counts:
            return list(map(self._cut, requests, counts))
        for request in requests:
            if request.slot not in self._forced_slots:
                self._truncate(request, 0)
        return [0] * len(requests)

    def _ask(self, call: Callable[[Proposer], T], otherwise: T) -> T:
        """Call the proposer. If it fails, nothing is drafted from now on, and nothing of it is kept."""
        try:
            return call(self._proposer)
        except Exception:
            logger.exception("drafting has failed; the engine goes on without speculative decoding")
            self._proposer = NoDrafts()
            return otherwise

    def _cut(self, request: Request, count: int) -> int:
        """Remove the drafts of a constrained request from the first one on that its grammar does not allow."""
        if not count or request.constraint is None:
            return count
        allowed = request.constraint.num_allowed(self._sequences.tail(request.slot, request.num_tokens))
        if allowed < count:
            self._truncate(request, allowed)
        return allowed

    def _truncate(self, request: Request, num_drafts: int) -> None:
        """Leave a sequence so many drafts, which are not computed yet."""
        size = request.num_tokens + num_drafts
        if self._sequences.num_tokens(request.slot) > size:
            self._sequences.truncate(request.slot, size)

    def _branches(self, requests: Sequence[Request], drafts: list[int], least: float, room: int) -> list[Branch]:
        """Return the branches that this many tokens and the free pages, without those of the prefix cache, are for."""
        found: list[Branch] = []
        pages, copied = self._sequences.free_pages, 0
        proposed = self._ask(lambda proposer: proposer.branches(requests, least), list[Branch]())
        for row, tokens in proposed:
            size = max(len(tokens), 1)
            room -= 1 + size
            pages -= 1 + self._limits.pages_for(size)
            copied += requests[row].num_tokens
            if room < 0 or pages < 0 or copied > MOST_COPIED:
                break
            if drafts[row]:
                found.append((row, tokens))
        return found

    def add(self, request: Request) -> None:
        """Follow a request that has arrived."""
        self._progress.begin()
        if request.message.predicted_token_ids:
            self._rest = 0
        if request.sampling.structured_outputs is not None and request.sampling.logprobs is not None:
            self._forcing.add(request)
            self._rest = 0
        self._ask(lambda proposer: proposer.begin(request), None)

    def remove(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Forget a request that ends, before its sequence is closed."""
        self._forcing.discard(request)
        self._progress.end(self._num_running)
        self._ask(lambda proposer: proposer.end(request), None)

    def count(self, totals: EngineTotals) -> None:
        """Give the totals of drafts."""
        totals.speculation = self.totals

    def _is_observed(self, batch: Batch) -> bool:
        """Return True if the proposer is to observe a step."""
        if not self._is_adaptive or not self._proposer.observes:
            return self._proposer.observes
        if batch.prefill_cost:
            return self._costs.allows(batch.num_decode_rows, self._observe_seconds)
        return self._costs.keeps(batch.num_decode_rows, self._observe_seconds)

    def _allows(self, num_decodes: int, seconds: float = math.inf) -> bool:
        return not self._is_adaptive or self._costs.allows(num_decodes, seconds)

    def _least_probability(self, batch: Batch) -> float:
        """Return how probable a draft must be to pay."""
        if not self._is_adaptive:
            return 0.0
        seconds = self._proposer.seconds
        if not batch.prefill_cost:
            return self._costs.least_probability(batch.num_decode_rows, seconds)
        return self._costs.least_beside_prompts(batch.num_decode_rows, self._prompt_token_seconds + seconds)
