"""Drafts that hold with one probability, whatever they are: for benchmarks and simulations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.engine_core.request import Request
from quire.engine_core.speculation.proposer import Proposer
from quire.kernels.runner import Sequences

_DRAFT = 0  # the token


class SyntheticDrafts(Proposer):
    """As many drafts as pay at their probability, which the executor decides by."""

    def __init__(self, sequences: Sequences, acceptance: float) -> None:
        self._sequences = sequences
        self._acceptance = acceptance

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        worthwhile, counts = self._worthwhile(least), []
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

    def _worthwhile(self, least: float) -> int:
        """Return how many drafts hold with a probability of `least` or more, all of them together."""
        if not 0 < least < 1 or not 0 < self._acceptance < 1:
            return 1 << 16 if self._acceptance >= least else 0
        return int(math.log(least) / math.log(self._acceptance))
