"""The contract between the engine and its executor, which computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.kernels.runner import Sequences, StepInput

LogprobsEntry = tuple[list[int], list[float], int]  # token ids and logprobs, the chosen one first; its rank


class StepResult(Protocol):
    """Result of one step; positions and keys count the sequences of the step in the order given."""

    @property
    def token_ids(self) -> Sequence[list[int]]:
        """The span of each sequence: the tokens that the step appended to it.

        Empty where none was sampled: the end was not computed, the mask was late, or the sample is pending. After a
        sampled token come those that the grammar forces, unless the request wants logprobs.
        """

    @property
    def first_rows(self) -> Sequence[int]:
        """The first row of each sequence among the step's tokens, or of the branch that has taken its place."""

    @property
    def lookahead_rows(self) -> Mapping[int, int]:
        """The rows of lookahead tokens among the step's tokens, by sequence."""

    @property
    def pending(self) -> Sequence[int]:
        """Rows whose samples are deferred; `collect_pending` adds them."""

    def logprobs(self, row: int) -> list[LogprobsEntry] | None:
        """Return an entry for each token of a span; None if the sequence asked for none."""

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
        """Give a slot without pages the first `num_computed` positions of `source`, and pages for `num_tokens`.

        Full pages are shared. Return False, and change nothing, when there are too few pages.
        """

    def submit(self, step: StepInput) -> Any:
        """Begin to compute a step, and return a handle for `collect`. Rows that reach their last token sample the next.

        Steps may be under way together, as long as no sequence is in two of them; they are collected in their order.

        Drafts are kept as far as they are what is sampled, and the span takes their place. Of its n tokens then, the
        first min(n - 1, start + count) are computed. A sequence with drafts, but without a constraint, may have
        branches: the path with the longest span is kept.

        Constrained sequences are sampled last and may still be `pending` when the step is collected. The constraints
        follow the spans; their masks may be written while a step computes. A step that raises, here or when it is
        collected, has put no page into the prefix cache, so that it can be computed again.
        """

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step of a handle, and return its result."""

    def collect_pending(self, result: Any) -> Mapping[int, list[int]]:
        """Add pending samples to the result of the last step; return the spans that are complete now, by row.

        Wait for one of them at least. Return none when none is pending; then the next step may be submitted.
        """


@dataclass(slots=True)
class PlainStepResult:
    """The result of an executor that samples tokens and nothing else: no logprobs, no embeddings, no errors."""

    token_ids: list[list[int]]
    pending: Sequence[int] = ()
    first_rows: Sequence[int] = ()
    lookahead_rows: Mapping[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[LogprobsEntry]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def logprobs(self, _row: int) -> None:
        """Return None: no sequence asks for logprobs."""
