"""What a scheduling policy decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from quire.engine_core.request import Request
from quire.kernels.runner import Sequences

Match = tuple[int, int, int]
"""What the prefix cache holds of a request: tokens, how many of their pages nobody has, and the last page or -1."""

MatchOf = Callable[[Request], Match | None]
"""None for a request that is to be left out of this step's order: it cannot be served at all, or there is no time."""

WINDOW = 64
"""Requests, the first that wait, that a policy looks up in the prefix cache and arranges anew in each step."""


class Policy:
    """The order in which those that wait are served. This one is that of arrival."""

    def key(self, request: Request) -> float:
        """The queue is sorted by this, the least first, and then by arrival. It must not change while one waits."""
        del request
        return 0.0

    def arrange(self, waiting: Iterable[Request], match_of: MatchOf, sequences: Sequences) -> Iterable[Request]:
        """The order in which to try those that wait, which come in order of their keys."""
        del match_of, sequences
        return waiting

    def may_wait(self, request: Request) -> bool:
        """Whether a request whose next page another one computes waits for it, though it could start."""
        del request
        return True

    def started(self, newcomers: Collection[Request]) -> None:
        """Of the last arrangement, these were taken."""
