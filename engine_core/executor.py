"""What the scheduler and the step ask of whatever computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from quire.engine_core.request import Request

LogprobsEntry = tuple[list[int], list[float], int]  # token ids and logprobs, the chosen one first; its rank


class StepResult(Protocol):
    """What one step computed; positions and keys count the sequences of the step in the order given."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The token sampled for each sequence, -1 where none was."""

    @property
    def logprobs(self) -> Sequence[LogprobsEntry | None] | None:
        """For each sequence that asked, the logprobs of its sampled token; None if nobody asked."""

    @property
    def prompt_logprobs(self) -> Mapping[int, Sequence[LogprobsEntry]]:
        """For a sequence that asked, the entry of prompt token p + 1 for each prompt position p of its chunk.

        Each comes once a slot: positions that are computed again after `release_pages` are left out.
        """

    @property
    def errors(self) -> Mapping[int, str]:
        """Sequences that failed alone (NaN logits), and why; whatever else there is for them means nothing."""


class Executor(Protocol):
    """Owns the KV pages and the token lists of the sequences, each named by a slot.

    `free_pages + held_pages + cached_pages` is the size of the pool at all times.
    """

    @property
    def free_pages(self) -> int:
        """Pages that `reserve` can hand out."""

    @property
    def held_pages(self) -> int:
        """Pages of open slots."""

    @property
    def cached_pages(self) -> int:
        """Pages that no slot holds but whose contents are kept."""

    def open(self, request: Request) -> int:
        """A slot with the prompt and the sampling state of `request`, without pages. ValueError if it cannot be had."""

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Makes the slot's pages cover `num_tokens` positions: all of them (True) or no change (False)."""

    def release_pages(self, slot: int) -> None:
        """Takes back the slot's pages; its tokens stay."""

    def close(self, slot: int) -> None:
        """Takes back everything."""

    def execute(self, slots: list[int], starts: list[int], counts: list[int]) -> StepResult:
        """Computes tokens `[start, start + count)` of each slot; where these include its last one, samples the next."""
