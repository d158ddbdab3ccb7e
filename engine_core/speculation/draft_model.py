"""Drafts of a smaller model with the same vocabulary, which runs in the same process and has KV pages of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine_core.decoding.single import sampling_config
from quire.engine_core.executor import Executor, StepResult
from quire.engine_core.request import Request
from quire.engine_core.speculation.sampled import Draft, SampledDrafts
from quire.kernels.runner import Sequences, StepInput


class DraftModel(SampledDrafts):
    """Method draft_model."""

    def __init__(
        self,
        executor: Executor,
        sequences: Sequences,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`executor` runs the draft model, within these bounds; `sequences` are the target's."""
        super().__init__(executor.sequences, sequences, max_num_batched_tokens, clock)
        self._executor = executor
        self._max_model_len = max_model_len

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        self._of_slot = {}
        ready: list[tuple[Request, Draft, int]] = []
        budget = self._catch_up_tokens
        for request, bound in zip(requests, most, strict=True):
            draft = self._draft_of(request) if bound > 0 else None
            if draft is None:
                continue
            self._follow(request, draft)
            if draft.num_computed >= draft.num_tokens:  # the target has sampled nothing since
                draft.num_computed = self._sequences.resume(draft.slot, draft.num_tokens - 1)
            count = self._worthwhile(draft, least) or int(self._is_tried(draft))
            count = min(bound, count, self._max_model_len - draft.num_tokens)
            if count < 1 or not self._sequences.reserve(draft.slot, draft.num_tokens + count):
                continue
            if draft.num_behind > budget:
                if budget:
                    self._step([draft], [budget])
                budget = 0
            else:
                budget -= draft.num_behind
                ready.append((request, draft, count))
        self._sample(ready)
        counts = {request: self._hand_over(request, draft, count) for request, draft, count in ready}
        return [counts.get(request, 0) for request in requests]

    def _draft_of(self, request: Request) -> Draft | None:
        draft = self._drafts.get(request)
        if draft is None and request not in self._without and request.num_tokens < self._max_model_len:
            return self._open(request, sampling_config(request), request.cache_salt)
        return draft

    def _step(self, drafts: list[Draft], counts: list[int]) -> StepResult:
        """Compute this many tokens of each."""
        step = StepInput([draft.slot for draft in drafts], [draft.num_computed for draft in drafts], counts)
        result = self._timed(len(drafts), sum(counts), lambda: self._executor.collect(self._executor.submit(step)))
        for draft, count in zip(drafts, counts, strict=True):
            draft.num_computed += count
        return result

    def _sample(self, ready: list[tuple[Request, Draft, int]]) -> None:
        """Sample as many tokens for each draft as are wanted, all of them at a time."""
        left = [(draft, count) for _, draft, count in ready]
        while left:
            counts = [self._sequences.num_tokens(draft.slot) - draft.num_computed for draft, _ in left]
            result = self._step([draft for draft, _ in left], counts)
            left = [
                (draft, count - 1)
                for row, (draft, count) in enumerate(left)
                if count > 1 and row not in result.errors and result.token_ids[row]
            ]
