"""What the scheduler and the step ask of whatever computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quire.kernels.runner import Sequences

LogprobsEntry = tuple[list[int], list[float], int]  # token ids and logprobs, the chosen one first; its rank


class StepResult(Protocol):
    """What one step computed; positions and keys count the sequences of the step in the order given."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The token sampled for each sequence, -1 where none was: its end was not computed, or its mask was late.

        DRAWN_LATER where `settle` is going to tell.
        """

    def logprobs(self, row: int) -> LogprobsEntry | None:
        """Of the token that was sampled for a sequence; None if it did not ask."""

    @property
    def prompt_logprobs(self) -> Mapping[int, Sequence[LogprobsEntry]]:
        """For a sequence that asked, the entry of prompt token p + 1 for each prompt position p of its chunk.

        Each comes once a slot: positions that are computed again after `release_pages` are left out.
        """

    @property
    def pooled(self) -> Mapping[int, bytes]:
        """For a sequence that is pooled and computed to its end now, its vector as little-endian f32."""

    @property
    def errors(self) -> Mapping[int, str]:
        """Sequences that failed alone (NaN logits), and why; whatever else there is for them means nothing."""


class Executor(Protocol):
    """Computes steps of the sequences, whose tokens and KV pages lie in `sequences`."""

    @property
    def sequences(self) -> Sequences:
        """The open sequences, by slot, and the KV pages."""

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        """Gives a slot without pages the first `num_computed` positions of `source`, and pages for `num_tokens`.

        Full pages are shared. False, and nothing has changed, when there are too few pages.
        """

    def step(self, slots: list[int], starts: list[int], counts: list[int]) -> StepResult:
        """Computes tokens `[start, start + count)` of each slot; where these include its last one, samples the next.

        Who has a rule draws last, maybe still when this returns, as `settle` tells. The rules follow what is drawn;
        their masks may be written while a step computes.
        """

    def settle(self, result: Any) -> Sequence[int]:
        """Adds to the result of the last step what was to be drawn later, and tells whose: that of the next rows.

        It waits for one of them at least. When all have been told, it tells of none; then the next step may come.
        """


class RulelessExecutor:
    """What those derive from to whom no request with a grammar comes."""

    def settle(self, _result: Any) -> Sequence[int]:
        """Nobody draws later."""
        return ()
