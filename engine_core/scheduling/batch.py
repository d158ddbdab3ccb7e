"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine_core.request import Request
from quire.protocol.messages import EventType


class Move(NamedTuple):
    """A request was started or preempted, and when; `num_cached_tokens` of it need not be computed."""

    request: Request
    event: EventType
    timestamp: float
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Batch:
    """What one step computes: `counts[i]` tokens of `requests[i]`, and then one token of each beam of `searches`."""

    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # of all rows
    searches: dict[Request, range] = field(default_factory=dict)  # and the rows of their beams
    num_decodes: int = 0
    prefill_cost: float = 0.0  # as Pace counts it
    num_cached_tokens: int = 0  # that those who start in this step need not compute
    moves: list[Move] = field(default_factory=list)  # since the step before
    failed: list[tuple[Request, str]] = field(default_factory=list)  # could not be opened; still to be released

    @property
    def slots(self) -> list[int]:
        """The executor's handle of each row."""
        slots = [request.slot for request in self.requests]
        return slots + [slot for request in self.searches for slot in request.slots]

    @property
    def starts(self) -> list[int]:
        """The first position of each chunk."""
        starts = [request.num_computed_tokens for request in self.requests]
        return starts + [request.num_computed_tokens for request, rows in self.searches.items() for _ in rows]

    def owner(self, row: int) -> Request:
        """Whose row it is."""
        if row < len(self.requests):
            return self.requests[row]
        return next(request for request, rows in self.searches.items() if row in rows)

    def add_search(self, request: Request) -> None:
        """Adds one token of each beam, when all `requests` are there."""
        self.searches[request] = range(len(self.counts), len(self.counts) + len(request.slots))
        self.counts.extend(1 for _ in request.slots)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and those computed again after a preemption."""
        return sum(self.counts) - self.num_decodes
