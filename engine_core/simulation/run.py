"""Steps to come in which nothing begins and nothing ends."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from quire.engine_core.request import Request


class Foreseen(NamedTuple):
    """One step: when it ends, and what it computes of prompts, at which cost."""

    end: float
    prefill_cost: float
    shares: list[tuple[Request, int]]


_end_of = attrgetter("end")


@dataclass(slots=True)
class Run:
    """Steps of which the first begins at `begin`, and each other one when the one before it ends.

    In each, those of `decodes` get one more token, and prompts a part of what they lack.
    """

    begin: float
    decodes: list[Request] = field(default_factory=list)
    steps: list[Foreseen] = field(default_factory=list)

    @property
    def end(self) -> float:
        """When the step after them begins."""
        return self.steps[-1].end if self.steps else self.begin

    def count_before(self, time: float) -> int:
        """How many of the steps begin before this time."""
        if not self.steps or self.begin >= time:
            return 0
        return 1 + bisect_left(self.steps, time, 0, len(self.steps) - 1, key=_end_of)

    def cut(self, time: float) -> None:
        """Forgets the steps that begin at this time or later."""
        del self.steps[self.count_before(time) :]

    def take(self, time: float) -> Run:
        """The steps that begin before this time; the others are left."""
        count = self.count_before(time)
        taken = Run(self.begin, self.decodes, self.steps[:count])
        self.begin = taken.end
        del self.steps[:count]
        return taken
