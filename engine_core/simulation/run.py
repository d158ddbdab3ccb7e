"""Steps to come in which nothing begins and nothing ends."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine_core.request import Request


class Chunks(NamedTuple):
    """What one step computes of prompts, and its cost as Pace counts it."""

    shares: list[tuple[Request, int]]
    cost: float

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return sum(count for _, count in self.shares)


@dataclass(slots=True)
class Run:
    """Steps of which the first begins at `begin`, and each other one when the one before it ends.

    In each, those of `decodes` get one more token. `chunks` has the prompts' parts of each, and is empty without any.
    """

    begin: float
    decodes: list[Request] = field(default_factory=list)
    ends: array[float] = field(default_factory=lambda: array("d"))
    chunks: list[Chunks] = field(default_factory=list)

    @property
    def end(self) -> float:
        """When the step after them begins."""
        return self.ends[-1] if self.ends else self.begin

    def count_before(self, time: float) -> int:
        """How many of the steps begin before this time."""
        if not self.ends or self.begin >= time:
            return 0
        return 1 + bisect_left(self.ends, time, 0, len(self.ends) - 1)

    def cut(self, time: float) -> None:
        """Forgets the steps that begin at this time or later."""
        count = self.count_before(time)
        del self.ends[count:]
        del self.chunks[count:]

    def take(self, time: float) -> Run:
        """The steps that begin before this time; the others are left."""
        count = self.count_before(time)
        taken = Run(self.begin, self.decodes, self.ends[:count], self.chunks[:count])
        self.begin = taken.end
        del self.ends[:count]
        del self.chunks[:count]
        return taken
