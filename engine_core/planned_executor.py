"""An executor without a model: real sequences, pages and prefix cache, and tokens that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.engine_core.executor import PlainStepResult
from quire.kernels.runner import Sequences, StepInput

NextToken = Callable[[int, int], int]
"""Tells the token after the first `end` ones of the sequence in `slot`."""


class PlannedExecutor:
    """An `Executor` for requests without grammars, logprobs and drafts, whose sequences get the tokens of a plan."""

    def __init__(self, sequences: Sequences, next_token: NextToken) -> None:
        self.sequences = sequences
        self._next_token = next_token

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        """Share the pages; there is no KV to copy."""
        return self.sequences.fork(slot, source, num_computed, num_tokens)

    def submit(self, step: StepInput) -> PlainStepResult:
        """Update the sequences and the prefix cache as a model's runner does, and compute nothing."""
        assert not step.num_drafts
        assert not step.branches
        sequences = self.sequences
        spans: list[list[int]] = []
        for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True):
            span, end = [], start + count
            if end == sequences.num_tokens(slot):
                span = [self._next_token(slot, end)]
                sequences.append(slot, span[0])
            sequences.share(slot, end)
            spans.append(span)
        return PlainStepResult(spans)

    def collect(self, handle: PlainStepResult) -> PlainStepResult:
        """Return the result of a step."""
        return handle

    def collect_pending(self, _result: PlainStepResult) -> Mapping[int, list[int]]:
        """Return no spans: none is ever pending."""
        return {}
