"""Extends the decoding sequences of a step by drafts, as far as these pay, and learns from what became of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.prefill_budget import PrefillBudget
from quire.engine_core.speculation.costs import DraftCosts
from quire.engine_core.speculation.proposer import Proposer
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.totals import DraftTotals

logger = logging.getLogger(__name__)


class Speculation:
    """Drafts for the requests that decode one sequence.

    Each step computes drafts after a request's last token. The target samples at each of these positions what it would
    sample without drafts, and they are kept as far as they agree; so they change no token. How many there are follows
    from how probably each holds (`Proposer`) and what it costs (`DraftCosts`).
    """

    def __init__(self, proposer: Proposer, sequences: Sequences, max_drafts: int, limits: EngineShape) -> None:
        """Draft for `sequences`."""
        self.totals = DraftTotals(accepted_per_position=[0] * max_drafts)
        self._proposer = proposer
        self._sequences = sequences
        self._max_drafts = max_drafts
        self._limits = limits
        self._costs = DraftCosts()
        self._has_failed = False

    def extend(self, batch: Batch, budget: PrefillBudget, free_pages: int) -> None:
        """Add drafts to a batch; `free_pages` can be had, one of which each sequence may need for its next token."""
        count = batch.num_single_decodes
        if self._proposer.is_idle:
            return
        least = self._least_probability(batch, budget)
        room = self._limits.max_num_batched_tokens - sum(batch.counts)
        if not count or least >= 1 or room < count or free_pages < 2 * len(batch.slots):
            return
        requests, most = batch.requests[:count], min(self._max_drafts, room // count)
        bounds = [
            min(most, request.token_limit - request.num_tokens - 1) if request.decoding.takes_spans else 0
            for request in requests
        ]
        drafts = self._propose(requests, bounds, least)
        if any(drafts):
            batch.add_drafts(drafts)
            for request, number in zip(requests, drafts, strict=True):
                if number:
                    self._count_pages(request, number)

    def learn(self, batch: Batch, seconds: float) -> None:
        """Learn from a step that has been computed, and count its drafts."""
        rows = [row for row, number in enumerate(batch.num_drafts) if number]
        if rows:
            self._count(rows, batch)
            sampled = [row for row in rows if batch.requests[row].num_tokens > batch.starts[row] + 1]
            self._proposer.learn([batch.slots[row] for row in sampled], [batch.accepted[row] for row in sampled])
        if not batch.prefill_cost and batch.num_decode_rows:
            num_tokens = batch.num_decode_rows + sum(batch.accepted)
            self._costs.learn(batch.num_decode_rows, sum(batch.num_drafts), num_tokens, seconds)

    def _count(self, rows: list[int], batch: Batch) -> None:
        totals = self.totals
        totals.drafts += len(rows)
        totals.draft_tokens += sum(batch.num_drafts)
        totals.accepted_tokens += sum(batch.accepted)
        for row in rows:
            for position in range(batch.accepted[row]):
                totals.accepted_per_position[position] += 1

    def _propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """Return the numbers of drafts. Where drafting fails, none are left, and nothing is drafted from now on."""
        if self._has_failed:
            return []
        try:
            return self._proposer.propose(requests, most, least)
        except Exception:
            logger.exception("drafting has failed; the engine goes on without speculative decoding")
        self._has_failed = True
        for request in requests:
            if self._sequences.num_tokens(request.slot) > request.num_tokens:
                left = self._sequences.truncate(request.slot, request.num_tokens)
                request.num_computed_tokens = min(request.num_computed_tokens, left)
        return []

    def begin(self, request: Request) -> None:
        """Take note of a request that has arrived."""
        self._proposer.begin(request)

    def end(self, request: Request) -> None:
        """Forget a request that ends, before its sequence is closed."""
        if not self._has_failed:
            self._proposer.end(request)

    def _least_probability(self, batch: Batch, budget: PrefillBudget) -> float:
        """Return how probable a draft must be to pay; beside prompts it costs what a token of theirs costs."""
        if not batch.prefill_cost:
            return self._costs.least_probability(batch.num_decode_rows, self._proposer.seconds)
        return budget.token_share(batch.prefill_cost, batch.num_decode_rows) * batch.num_decode_rows or math.inf

    def _count_pages(self, request: Request, num_drafts: int) -> None:
        covered = self._limits.pages_for(request.num_tokens + num_drafts) * self._limits.block_size
        request.num_reserved_tokens = max(request.num_reserved_tokens, covered)
