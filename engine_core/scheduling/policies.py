"""The scheduling policies, which order the waiting requests; a table has them by the names of `--scheduling-policy`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from quire.engine_core.request import Request
from quire.kernels.runner import Sequences

Match = tuple[int, int, int]
"""Cached tokens of a request, how many of their pages no request holds, and the last of these pages or -1."""

MatchOf = Callable[[Request], Match | None]
"""Looks a request up in the prefix cache; None leaves it out of this step: it can't be opened, or time is up."""

WINDOW = 64
"""Requests at the front of the queue that a policy looks up in the prefix cache and reorders in each step."""

AGING_SECONDS = 10.0
"""Waiting time that makes up for one level of `priority`."""

AGING_TOKENS_PER_SECOND = 1000.0
"""Tokens by which each second of waiting shortens a request in the eyes of `ShortestJobFirst`."""

MAX_TIMES_PASSED_OVER = 32
"""Steps in which later requests may start before a request; then it is served in order of arrival."""


class Policy:
    """Order of the waiting requests of a tenant. The base class serves them in order of arrival.

    A preempted request keeps its arrival, so it comes before the requests that have waited since.
    """

    aging_seconds = math.inf
    """Time without service that takes a tenant up by one level."""

    def level(self, request: Request) -> int:
        """Return the level of a request. Tenants with the least levels are served first, and take turns on the same."""
        del request
        return 0

    def key(self, request: Request) -> float:
        """Return the key that sorts the queue before arrival, least first. It must not change while a request waits."""
        del request
        return 0.0

    def arrange(self, waiting: Iterable[Request], match_of: MatchOf, sequences: Sequences) -> Iterable[Request]:
        """Return the order in which to try the waiting requests, which come sorted by their keys."""
        del match_of, sequences
        return waiting

    def may_wait(self, request: Request) -> bool:
        """Return True if a request may wait for a page that another request is computing, though it could start."""
        del request
        return True

    def admitted(self, waiting: Iterable[Request], requests: Collection[Request]) -> None:
        """Note which requests were admitted in the last arrangement of those waiting, among which they still are."""

    def forget(self, request: Request) -> None:
        """Forget a request that ends."""


class FirstComeFirstServed(Policy):
    """Order of arrival."""


class Priority(Policy):
    """Lowest `priority` value first. Waiting makes up for a low priority, so no request and no tenant starves."""

    aging_seconds = AGING_SECONDS

    def level(self, request: Request) -> int:
        """Return the priority."""
        return request.message.priority

    def key(self, request: Request) -> float:
        """Return the arrival, delayed by the priority: all requests age alike, so no pair ever changes its order."""
        return request.arrival + AGING_SECONDS * request.message.priority


class ShortestJobFirst(Policy):
    """Fewest tokens left to prefill first. Waiting shortens a long prompt, so no request starves."""

    def key(self, request: Request) -> float:
        """Return the length as if nothing were cached. All requests age alike, so no pair ever changes its order."""
        return request.arrival * AGING_TOKENS_PER_SECOND + request.num_tokens

    def arrange(self, waiting: Iterable[Request], match_of: MatchOf, sequences: Sequences) -> Iterable[Request]:
        """Sort the window by length without the cached tokens."""
        del sequences
        keys = {
            request: self.key(request) - match[0]
            for request in islice(waiting, WINDOW)
            if (match := match_of(request)) is not None
        }
        return sorted(keys, key=keys.__getitem__)


class LongestPrefixMatch(Policy):
    """Longest cached prefix first, in depth-first order of the prefix cache, so that shared pages stay in it."""

    def __init__(self) -> None:
        self.times_passed_over = Counter[Request]()  # steps in which a later request was admitted

    def arrange(self, waiting: Iterable[Request], match_of: MatchOf, sequences: Sequences) -> Iterable[Request]:
        """Put requests that were passed over too often first, then the others by their matches."""
        window = list(islice(waiting, WINDOW))
        overdue = [request for request in window if not self.may_wait(request)]
        others, ends = [], []
        for request in window:
            if self.may_wait(request) and (match := match_of(request)) is not None:
                others.append(request)
                ends.append(match[2])
        return [*overdue, *(others[i] for i in sequences.tree.depth_first(ends))]

    def may_wait(self, request: Request) -> bool:
        """Return False for a request that was passed over too often: computing that page could take a whole prompt."""
        return self.times_passed_over[request] < MAX_TIMES_PASSED_OVER

    def admitted(self, waiting: Iterable[Request], requests: Collection[Request]) -> None:
        """Count, for each request that still waits, that a later one was admitted."""
        latest = max(request.number for request in requests)
        for request in islice(waiting, WINDOW):
            if request.number < latest and request not in requests:
                self.times_passed_over[request] += 1

    def forget(self, request: Request) -> None:
        """Forget how often a request was passed over."""
        self.times_passed_over.pop(request, None)


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "lpm": LongestPrefixMatch,
    "sjf": ShortestJobFirst,
}
