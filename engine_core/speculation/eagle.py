"""Drafts of a head that reads hidden states of the model, its features (EAGLE, EAGLE-3, MTP; kernels/draft_head.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.engine_core.decoding.single import sampling_config
from quire.engine_core.executor import StepResult
from quire.engine_core.request import NO_SLOT, Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.speculation.draft_tree import DraftPath, DraftTree, TreeConfidence
from quire.engine_core.speculation.proposer import MOST_COPIED
from quire.engine_core.speculation.sampled import Draft, SampledDrafts
from quire.kernels.assembly import Rows
from quire.kernels.draft_head import DraftHead
from quire.kernels.runner import Sequences, StepInput

_CONTEXT = 512  # last tokens of a prompt that the head reads, and most features of a request that wait for it
_MOST_BYTES = 64 << 20  # of features that wait
_LIKELIEST = 2  # tokens whose probabilities the head tells
_MOST_WIDE = 4  # requests at a time whose branches the head continues


@dataclass(slots=True)
class _Kept:
    """Features of a request that the head has not read, those before position `next`; `first` was its first one."""

    first: int
    next: int
    rows: list[Rows] = field(default_factory=list)
    num_rows: int = 0


class EagleDrafts(SampledDrafts):
    """Methods eagle, eagle3 and mtp.

    The head's sequence of a request begins where its features begin: these are gone after the model's next step, and
    there are none of what the prefix cache had, of the beginning of a long prompt, and of the time when drafts did not
    pay. Its token i, the target's number first + i, comes with the feature of the token before.
    """

    def __init__(
        self,
        head: DraftHead,
        sequences: Sequences,
        features: list[Rows],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`sequences` are the target's, and `features` [tokens, width] each those of its last step."""
        super().__init__(head.sequences, sequences, head.max_num_batched_tokens, clock)
        self._head = head
        self._features = features
        self._kept: dict[Request, _Kept] = {}
        self._trees: dict[Request, DraftTree] = {}  # that were grown last
        self._confidence = TreeConfidence()
        self._num_rows = 0
        self._most_rows: int = _MOST_BYTES // (4 * head.num_features * features[0].shape[1])

    @property
    def observes(self) -> bool:
        """See Proposer."""
        return True

    def observe(self, batch: Batch) -> None:
        """Keep the features of the tokens that the step has computed."""
        firsts = batch.first_rows or list(itertools.accumulate(batch.step.counts, initial=0))
        for request, row in zip(batch.requests, batch.rows, strict=True):
            if not request.decoding.takes_spans or request.is_finished or request.slot == NO_SLOT:
                continue
            if request in self._without:
                continue
            start, count = batch.step.starts[row], batch.step.counts[row]
            if batch.step.num_drafts:
                count -= batch.step.num_drafts[row] - batch.accepted[row]
            skipped = self._skipped(request, start)
            if skipped < count and self._has_room(request, count - skipped):
                kept = self._rows(firsts[row] + skipped, firsts[row] + count)
                if self._head.lookahead:
                    ahead = batch.lookahead_rows.get(row)
                    own = np.zeros((1, kept.shape[1]), np.float32) if ahead is None else self._rows(ahead, ahead + 1)
                    kept = np.concatenate([kept, np.broadcast_to(own, kept.shape)], axis=1)
                self._keep(request, start + skipped, kept)

    def _rows(self, first: int, end: int) -> Rows:
        """Return a copy of these rows of the features: the next step overwrites them."""
        return np.concatenate([rows[first:end] for rows in self._features], axis=1)

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        self._of_slot = {}
        self._trees = {}
        ready: list[tuple[Request, Draft, DraftTree]] = []
        budget = self._catch_up_tokens
        for request, bound in zip(requests, most, strict=True):
            kept = self._kept.get(request)
            if bound < 1 or kept is None or kept.next != request.num_tokens - 1 or not kept.num_rows:
                continue
            draft = self._draft_of(request, kept)
            tree = None if draft is None else self._tree_for(request, draft, bound, least)
            if draft is None or tree is None:
                continue
            if draft.num_behind > budget:
                if budget:
                    self._read([(request, draft, budget)])
                budget = 0
            else:
                budget -= draft.num_behind
                ready.append((request, draft, tree))
        self._grow(ready)
        counts = {request: self._hand_over(request, draft, tree.num_drafts) for request, draft, tree in ready}
        return [counts.get(request, 0) for request in requests]

    def branches(self, requests: Sequence[Request], least: float) -> list[tuple[int, list[int]]]:
        """See Proposer."""
        found = []
        for index, request in enumerate(requests):
            if (tree := self._trees.get(request)) is not None and request.constraint is None:
                found += [(index, path) for path in tree.branches(least)]
                if self._head.lookahead and tree.num_drafts and len(self._trees) <= _MOST_WIDE:
                    found.append((index, []))
        return found

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """See Proposer."""
        super().learn(slots, accepted)
        trees = {request.slot: tree for request, tree in self._trees.items()}
        for slot in slots:
            if slot in self._of_slot and (tree := trees.get(slot)) is not None:
                tree.learn(self._target.tail(slot, tree.position))

    def end(self, request: Request) -> None:
        """See Proposer. With its next features, a request that goes on begins anew."""
        super().end(request)
        self._trees.pop(request, None)
        if (kept := self._kept.pop(request, None)) is not None:
            self._num_rows -= kept.num_rows

    def _skipped(self, request: Request, start: int) -> int:
        """Return how many features of a chunk that begins at `start` are not needed."""
        if (kept := self._kept.get(request)) is not None:
            if start <= kept.next and kept.num_rows <= _CONTEXT:
                return kept.next - start
            self.end(request)
        return max(request.num_prompt_tokens - _CONTEXT - start, 0)

    def _has_room(self, request: Request, num_rows: int) -> bool:
        """Return True if so many features more may wait; a part of the room is for requests that have some already."""
        most = self._most_rows if request in self._kept else self._most_rows * 3 // 4
        return self._num_rows + num_rows <= most

    def _keep(self, request: Request, start: int, rows: Rows) -> None:
        kept = self._kept.setdefault(request, _Kept(start, start))
        kept.rows.append(rows)
        kept.num_rows += len(rows)
        kept.next += len(rows)
        self._num_rows += len(rows)

    def _draft_of(self, request: Request, kept: _Kept) -> Draft | None:
        """Return the head's sequence, with the target's tokens; None if there is none."""
        draft = self._drafts.get(request)
        if draft is None:
            if request in self._without:
                return None
            return self._open(request, sampling_config(request), None, kept.first + 1, logprobs=_LIKELIEST)
        self._follow(request, draft)
        return draft

    def _read(self, chunks: list[tuple[Request, Draft, int]]) -> StepResult:
        """Compute this many tokens of each sequence from their features."""
        drafts, counts = [draft for _, draft, _ in chunks], [count for _, _, count in chunks]
        step = StepInput([draft.slot for draft in drafts], [draft.num_computed for draft in drafts], counts)
        features = [self._take(request, count) for request, _, count in chunks]
        result = self._timed(len(chunks), sum(counts), lambda: self._head.run(step, features))
        for _, draft, count in chunks:
            draft.num_computed += count
        return result

    def _take(self, request: Request, count: int) -> Rows:
        kept = self._kept[request]
        rows = np.concatenate(kept.rows)
        kept.rows = [rows[count:].copy()] if count < len(rows) else []
        kept.num_rows -= count
        self._num_rows -= count
        return rows[:count]

    def _tree_for(self, request: Request, draft: Draft, most: int, least: float) -> DraftTree | None:
        """Return an empty tree; None where no draft is worthwhile, or there is no room."""
        if draft.num_tokens + most > self._head.max_model_len:
            self.end(request)
            return None
        if not self._worthwhile(draft, least):
            if not self._is_tried(draft):
                return None
            most, least = 1, 0.0
        has_room = self._sequences.reserve(draft.slot, draft.num_tokens + most)
        return DraftTree(request.num_tokens, most, least, draft.slot, self._confidence) if has_room else None

    def _grow(self, ready: list[tuple[Request, Draft, DraftTree]]) -> None:
        """Grow a tree of drafts for each request, level by level, all of them at a time.

        The first level comes from features, the others from hidden states of the head. These are no features: what is
        computed of them is computed again.
        """
        if not ready:
            return
        self._trees = {request: tree for request, _, tree in ready}
        copied = sum(tree.most * draft.num_tokens for _, draft, tree in ready)
        wide = len(ready) <= _MOST_WIDE and copied <= MOST_COPIED
        result = self._read([(request, draft, draft.num_behind) for request, draft, _ in ready])
        growing = [(tree, tree.main) for _, _, tree in ready]
        try:
            while growing := self._next_level(growing, result, wide=wide):
                rows, slots = [path.row for _, path in growing], [path.slot for _, path in growing]
                starts = [self._sequences.num_tokens(slot) - 1 for slot in slots]
                step = StepInput(slots, starts, [1] * len(slots))
                result = self._timed(len(slots), len(slots), lambda: self._head.go_on(rows, step))  # noqa: B023
        finally:
            for _, _, tree in ready:
                for slot in tree.own_slots:
                    self._sequences.close(slot)

    def _next_level(
        self, level: list[tuple[DraftTree, DraftPath]], result: StepResult, *, wide: bool
    ) -> list[tuple[DraftTree, DraftPath]]:
        """Add what a step has sampled to its paths; return those that go on, new ones among them."""
        growing = []
        for row, (tree, path) in enumerate(level):
            path.row = row
            logprobs = result.logprobs(row)
            if row in result.errors or not logprobs:
                continue
            (token, *likely), (logprob, *others), _ = logprobs[0]
            pairs = zip(likely, others, strict=True)
            other = next(((each, math.exp(value)) for each, value in pairs if each != token), None)
            branch = tree.split(path, other) if path is tree.main and other is not None else None
            tree.add(path, token, math.exp(logprob))
            if tree.goes_on(path):
                growing.append((tree, path))
            if wide and branch is not None and tree.goes_on(branch) and self._open_path(tree, path, branch):
                tree.own_slots.append(branch.slot)
                growing.append((tree, branch))
        return growing

    def _open_path(self, tree: DraftTree, parent: DraftPath, branch: DraftPath) -> bool:
        """Give a branch a sequence of its own, which leaves its parent's before the last token."""
        sequences = self._sequences
        size = sequences.num_tokens(parent.slot)
        slot = sequences.open_branch(parent.slot, size - 1, branch.tokens[-1:])
        if not self._head.fork(slot, parent.slot, size - 1, size + tree.most - len(branch.tokens)):
            sequences.close(slot)
            return False
        branch.slot, branch.row = slot, parent.row
        return True
