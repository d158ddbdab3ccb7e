"""Rates of the last minute, for the sparklines of the page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from quire.frontend.client.observer import OpenRequest

SECONDS = 60.0
INTERVALS_PER_SECOND = 4


class RecentPoint(msgspec.Struct, gc=False):
    """Rates of one interval that began at `time` (seconds of `time.monotonic()`).

    `tokens_per_second` counts generated tokens. `ttft` and `itl` are means in seconds, None without samples: `itl` over
    all tokens but the first of each completion, where one that came with the token before has waited 0.
    """

    time: float
    tokens_per_second: float
    ttft: float | None
    itl: float | None


class _Interval:
    __slots__ = ("first_seconds", "gap_seconds", "num_firsts", "num_followers", "num_tokens", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_tokens = self.num_firsts = self.num_followers = 0
        self.first_seconds = self.gap_seconds = 0.0


class RecentRates:
    """An `Observer` that keeps the tokens, TTFT and ITL of the last `SECONDS`, in intervals of 250 ms."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._intervals: deque[_Interval] = deque(maxlen=int(SECONDS * INTERVALS_PER_SECOND))
        self._current = _Interval(0)

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""
        interval = self._at(timestamp)
        interval.num_firsts += 1
        interval.first_seconds += timestamp - request.metrics.arrival_time

    def on_tokens(self, num_tokens: int, num_together: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""
        interval = self._at(timestamp)
        interval.num_tokens += num_tokens
        interval.num_followers += len(gaps) + num_together
        interval.gap_seconds += sum(gaps)

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""

    def points(self) -> list[RecentPoint]:
        """Return all complete intervals of the last minute, the oldest first; empty ones are zeros."""
        now = int(self._clock() * INTERVALS_PER_SECOND)
        known = {interval.number: interval for interval in self._intervals}
        first = now - int(SECONDS * INTERVALS_PER_SECOND)
        return [_point(known.get(number) or _Interval(number)) for number in range(first, now)]

    def _at(self, timestamp: float) -> _Interval:
        number = int(timestamp * INTERVALS_PER_SECOND)
        if number != self._current.number:
            self._current = _Interval(number)
            self._intervals.append(self._current)
        return self._current


def _point(interval: _Interval) -> RecentPoint:
    return RecentPoint(
        interval.number / INTERVALS_PER_SECOND,
        interval.num_tokens * INTERVALS_PER_SECOND,
        interval.first_seconds / interval.num_firsts if interval.num_firsts else None,
        interval.gap_seconds / interval.num_followers if interval.num_followers else None,
    )
