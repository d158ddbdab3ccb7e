"""The longest prefix match first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from quire.engine_core.request import Request
from quire.engine_core.scheduling.policies.base import WINDOW, MatchOf, Policy
from quire.kernels.runner import Sequences

MOST_PASSES = 32
"""Steps in which a later one may start before a request. Then it is served in order of arrival."""


class LongestPrefixMatch(Policy):
    """The longest shared prefix first, in depth-first order of the prefix cache, so that what is shared stays in it."""

    def __init__(self) -> None:
        self._window: list[Request] = []

    def arrange(self, waiting: Iterable[Request], match_of: MatchOf, sequences: Sequences) -> Iterable[Request]:
        """Those that were passed over too often come first."""
        self._window = list(islice(waiting, WINDOW))
        overdue = [request for request in self._window if not self.may_wait(request)]
        others, ends = [], []
        for request in self._window:
            if self.may_wait(request) and (match := match_of(request)) is not None:
                others.append(request)
                ends.append(match[2])
        return [*overdue, *(others[i] for i in sequences.tree.depth_first(ends))]

    def may_wait(self, request: Request) -> bool:
        """Not when it was passed over too often: what it waits for could take as long as a prompt."""
        return request.num_passed_over < MOST_PASSES

    def started(self, newcomers: Collection[Request]) -> None:
        """Counts for those who wait on that somebody later has started."""
        latest = max(request.number for request in newcomers)
        for request in self._window:
            if request.number < latest and request not in newcomers:
                request.num_passed_over += 1
