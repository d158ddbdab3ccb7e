"""The input of a step, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

Branch = tuple[int, list[int]]
"""Tokens that may come instead of a sequence's drafts, after its number in the step; none: the lookahead token."""


@dataclass(slots=True)
class StepInput:
    """The rows of a step, one for each sequence, as columns: row i computes tokens [start, start + count) of its slot.

    The last `num_drafts` tokens of a row are drafts; without that column no row has any. `branches` may be kept instead
    of the drafts of the rows that they name.
    """

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    def rows(self, rows: slice) -> StepInput:
        """Return some of the rows, without their drafts."""
        counts = self.counts[rows]
        if self.num_drafts:
            counts = [count - drafts for count, drafts in zip(counts, self.num_drafts[rows], strict=True)]
        return StepInput(self.slots[rows], self.starts[rows], counts)

    def add(self, other: StepInput) -> None:
        """Append the rows of a step without drafts."""
        self.slots += other.slots
        self.starts += other.starts
        self.counts += other.counts

    def add_drafts(self, drafts: list[int], branches: list[Branch]) -> None:
        """Let the first rows have so many drafts, and branches beside these."""
        self.branches = branches
        self.num_drafts = [*drafts, *[0] * (len(self.counts) - len(drafts))]
        self.counts = [count + number for count, number in zip(self.counts, self.num_drafts, strict=True)]
