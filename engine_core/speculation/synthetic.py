"""Drafts with a given acceptance probability, whatever their tokens are: for benchmarks and simulations."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine_core.request import Request
from quire.engine_core.speculation.proposer import Proposer, drafts_worthwhile
from quire.kernels.runner import Sequences

_DRAFT = 0  # the token


class SyntheticDrafts(Proposer):
    """Drafts of no content, as many as pay at their probability, which the executor decides by."""

    def __init__(self, sequences: Sequences, acceptance: float) -> None:
        self._sequences = sequences
        self._acceptance = acceptance

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        worthwhile, counts = drafts_worthwhile(self._acceptance, least), []
        for request, bound in zip(requests, most, strict=True):
            count = max(min(bound, worthwhile), 0)
            if not self._sequences.reserve(request.slot, request.num_tokens + count):
                count = 0
            for _ in range(count):
                self._append(request.slot)
            counts.append(count)
        return counts

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """Learn nothing: the probability is given."""

    def _append(self, slot: int) -> None:
        self._sequences.append(slot, _DRAFT)
