"""Those that run, by what the next step does for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.engine_core.request import Request


@dataclass(slots=True)
class Roster:
    """Every running request is in one of the first three, each in the order in which they started."""

    decodes: list[Request] = field(default_factory=list)  # of one sequence
    prefills: list[Request] = field(default_factory=list)
    searches: list[Request] = field(default_factory=list)  # whose beams decode
    growing: list[Request] = field(default_factory=list)  # who may need pages for their next tokens

    @classmethod
    def of(cls, running: Iterable[Request]) -> Roster:
        """All of them, in one pass."""
        roster = cls()
        roster.add(running)
        return roster

    def add(self, running: Iterable[Request]) -> None:
        """Some more."""
        for request in running:
            if request.in_prefill:
                self.prefills.append(request)
            elif request.search is None:
                self.decodes.append(request)
            else:
                self.searches.append(request)
            if request.num_tokens > request.num_reserved_tokens or request.search is not None:
                self.growing.append(request)

    @property
    def num_decodes(self) -> int:
        """Rows of the step for those that decode: one a sequence."""
        return len(self.decodes) + sum(len(request.slots) for request in self.searches)
