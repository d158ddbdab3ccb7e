"""Times of fetches from a peer, as measured lately."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine_core.averages import average

_TRUST_SECONDS = 60.0  # for which measured times count
_BLEND = 0.2  # weight of a new measurement


class FetchTimes:
    """The time of an answer without pages, and that of each page; both count for a while only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answer = self._page = 0.0
        self._measured = -_TRUST_SECONDS

    def learn(self, seconds: float, num_pages: int) -> None:
        """Learn from a fetch that has brought so many pages."""
        self._measured = self._clock()
        if num_pages:
            self._page = average(self._page, seconds / num_pages, _BLEND)
        else:
            self._answer = average(self._answer, seconds, _BLEND)

    def seconds(self, num_pages: int) -> float:
        """Return the likely time of a fetch; 0 if nothing is known."""
        if self._clock() - self._measured > _TRUST_SECONDS:
            return 0.0
        return self._answer + num_pages * self._page
