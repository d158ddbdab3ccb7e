"""Value of accepted drafts to a batch, which takes as long as its slowest sequence."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine_core.scheduling.batch import Batch

_WEIGHT = 1 / 16  # of a place that was left


class DraftGain(NamedTuple):
    """Gain of one step by its accepted drafts."""

    num_accepted: int = 0
    num_steps: int = 0  # steps saved, as even the slowest sequence has gained so many tokens
    refilled: float = 0.0  # share of the places of ended requests that other requests take


class Progress:
    """Leads of sequences over the slowest by accepted drafts, and the share of freed places that others take.

    Tokens that all have gained save a step. A token that only some have gained saves its row in a later step; it saves
    its share of a step only if another request takes the place that its request leaves the earlier.
    """

    def __init__(self) -> None:
        self._ahead: dict[int, int] = {}  # tokens, by the number of the request
        self._num_open = self._num_left = 0  # requests; places that were left and not taken
        self._refilled = 0.0

    def gain_of(self, batch: Batch) -> DraftGain:
        """Take note of a step with drafts, and return what they have brought."""
        num_accepted = sum(batch.accepted)
        if not num_accepted:
            return DraftGain(refilled=self._refilled)
        known, single = self._ahead, batch.requests[: batch.num_single_decodes]
        ahead = {
            request.number: known.get(request.number, 0) + accepted
            for request, accepted in zip(single, batch.accepted, strict=False)
        }
        slowest = 0 if len(single) < batch.num_decode_rows else min(ahead.values())
        self._ahead = {number: tokens - slowest for number, tokens in ahead.items()} if slowest else ahead
        return DraftGain(num_accepted, slowest, self._refilled)

    def begin(self) -> None:
        """Take note of a request that has arrived."""
        self._num_open += 1
        if self._num_left:
            self._num_left -= 1
            self._refilled += _WEIGHT * (1 - self._refilled)

    def end(self, num_running: int) -> None:
        """Take note of a request that ends, one of so many that were running."""
        self._num_open -= 1
        if self._num_open >= num_running:  # a waiting one takes its place
            self._refilled += _WEIGHT * (1 - self._refilled)
        elif self._num_open:
            self._num_left += 1
        else:
            self._refilled *= (1 - _WEIGHT) ** self._num_left
            self._num_left = 0
