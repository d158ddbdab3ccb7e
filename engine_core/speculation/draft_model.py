"""Drafts of a smaller model with the same vocabulary, which runs in the same process and has KV pages of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine_core.decoding.single import sampling_config
from quire.engine_core.executor import Executor
from quire.engine_core.request import Request
from quire.engine_core.speculation.proposer import Proposer
from quire.kernels.runner import Sequences

_CATCH_UP_TOKENS = 256  # of prompts that the draft model computes in a step: others wait for it
_FIRST_ACCEPTANCE = 0.7  # before anything is known
_LEARN = 0.1  # weight of a draft
_TRY_EVERY = 32  # steps without a draft, after which one is tried
_BLEND = 0.1


@dataclass(slots=True)
class _Draft:
    """The draft model's sequence of a request."""

    slot: int
    num_tokens: int  # that are the target's too
    num_computed: int = 0
    acceptance: float = _FIRST_ACCEPTANCE
    since_try: int = 0
    num_drafts: int = 0  # that were proposed last


class DraftModel(Proposer):
    """Method draft_model.

    Its sequences have the sampling parameters and the seed of the target's, so that both sample with the same random
    numbers, and agree as often as they can. A request whose sequence it has no pages for, or has not computed yet, has
    no drafts.
    """

    def __init__(
        self,
        executor: Executor,
        sequences: Sequences,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`executor` runs the draft model, within these bounds; `sequences` are the target's."""
        self._executor = executor
        self._sequences = executor.sequences
        self._target = sequences
        self._max_model_len = max_model_len
        self._step_tokens = min(max_num_batched_tokens, _CATCH_UP_TOKENS)
        self._clock = clock
        self._drafts: dict[Request, _Draft] = {}
        self._without: set[Request] = set()  # for whose prompts there were too few pages
        self._of_slot: dict[int, _Draft] = {}  # by the target's slot: those proposed last
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """See Proposer."""
        return self._seconds

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        self._of_slot = {}
        ready: list[tuple[Request, _Draft, int]] = []
        budget = self._step_tokens
        for request, bound in zip(requests, most, strict=True):
            draft = self._draft_of(request) if bound > 0 else None
            if draft is None:
                continue
            self._follow(request, draft)
            count = min(bound, self._worthwhile(draft, least), self._max_model_len - draft.num_tokens)
            behind = draft.num_tokens - draft.num_computed
            if count < 1 or not self._sequences.reserve(draft.slot, draft.num_tokens + count):
                continue
            if behind > budget:
                self._catch_up(draft, budget)
                budget = 0
            else:
                budget -= behind
                ready.append((request, draft, count))
        self._sample(ready)
        counts = {request: self._hand_over(request, draft, count) for request, draft, count in ready}
        return [counts.get(request, 0) for request in requests]

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """See Proposer."""
        for slot, held in zip(slots, accepted, strict=True):
            draft = self._of_slot.get(slot)
            if draft is not None:
                for number in range(min(held + 1, draft.num_drafts)):
                    draft.acceptance += _LEARN * ((number < held) - draft.acceptance)

    def end(self, request: Request) -> None:
        """Close its sequence."""
        self._without.discard(request)
        if (draft := self._drafts.pop(request, None)) is not None:
            self._sequences.close(draft.slot)

    def _draft_of(self, request: Request) -> _Draft | None:
        draft = self._drafts.get(request)
        if draft is None and request not in self._without and request.num_tokens < self._max_model_len:
            tokens = self._target.tokens(request.slot)
            config = sampling_config(request)
            config.logprobs = config.prompt_logprobs = None
            slot = self._sequences.open(
                tokens, request.num_prompt_tokens, sampling=config, cache_salt=request.cache_salt
            )
            found = self._sequences.start(slot, len(tokens))
            if found is None:
                self._sequences.close(slot)
                self._without.add(request)
                return None
            draft = self._drafts[request] = _Draft(slot, len(tokens), found)
        return draft

    def _follow(self, request: Request, draft: _Draft) -> None:
        """Give the draft the tokens that the target has sampled since, in the place of its own."""
        sequences = self._sequences
        new, own = self._target.tail(request.slot, draft.num_tokens), sequences.tail(draft.slot, draft.num_tokens)
        pairs = enumerate(zip(new, own, strict=False))
        same = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(new), len(own)))
        if same < len(own):
            left = sequences.truncate(draft.slot, draft.num_tokens + same, recompute_last=False)
            draft.num_computed = min(draft.num_computed, left)
        draft.num_tokens += same
        for token in new[same:]:
            sequences.append(draft.slot, token)
            draft.num_tokens += 1
        draft.num_computed = min(draft.num_computed, draft.num_tokens - 1)

    def _worthwhile(self, draft: _Draft, least: float) -> int:
        """Return how many drafts hold with a probability of `least` or more, all of them together."""
        acceptance = min(max(draft.acceptance, 1e-3), 0.99)
        count = int(math.log(least) / math.log(acceptance)) if 0 < least < 1 else (1 << 16) * (least <= 0)
        draft.since_try = 0 if count else draft.since_try + 1
        return max(count, int(draft.since_try >= _TRY_EVERY))

    def _catch_up(self, draft: _Draft, count: int) -> None:
        """Compute some of the tokens that a draft is behind."""
        if count > 0:
            self._executor.step([draft.slot], [draft.num_computed], [count])
            draft.num_computed += count

    def _sample(self, ready: list[tuple[Request, _Draft, int]]) -> None:
        """Sample as many tokens for each draft as are wanted, all of them at a time."""
        left = [(draft, count) for _, draft, count in ready]
        while left:
            begun = self._clock()
            starts = [draft.num_computed for draft, _ in left]
            counts = [self._sequences.num_tokens(draft.slot) - draft.num_computed for draft, _ in left]
            result = self._executor.step([draft.slot for draft, _ in left], starts, counts)
            for (draft, _), count in zip(left, counts, strict=True):
                draft.num_computed += count
            errors = result.errors
            left = [
                (draft, count - 1)
                for row, (draft, count) in enumerate(left)
                if count > 1 and row not in errors and result.token_ids[row]
            ]
            seconds = (self._clock() - begun) / len(starts)
            self._seconds += _BLEND * (seconds - self._seconds) if self._seconds else seconds

    def _hand_over(self, request: Request, draft: _Draft, most: int) -> int:
        """Append what was sampled to the target's sequence; return how many tokens that is."""
        tokens = self._sequences.tail(draft.slot, draft.num_tokens)[:most]
        size = request.num_tokens
        if not tokens or not self._target.reserve(request.slot, size + len(tokens)):
            tokens = []
        for token in tokens:
            self._target.append(request.slot, token)
        draft.num_drafts = len(tokens)
        self._of_slot[request.slot] = draft
        return len(tokens)
