"""The Retry-After of rejected requests, estimated from the rate at which requests finish."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from quire.frontend.client.observer import OpenRequest

_MOST_SECONDS = 60
_NUM_RECENT = 64


class RetryAfter:
    """An `Observer` that counts the open requests and keeps the times at which the latest ones finished.

    `clock`: seconds, as `time.monotonic()`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._since = clock()  # `_ends` holds every end since then
        self._ends: deque[float] = deque(maxlen=_NUM_RECENT)

    @property
    def seconds(self) -> int:
        """Whole seconds, 1 to 60, in which the open requests finish at the present rate.

        Until one has finished since the engine was idle, the estimate assumes that one finishes now, the earliest case.
        """
        seconds = (self._clock() - self._since) * self._num_open / max(1, len(self._ends))
        return min(max(1, math.ceil(seconds)), _MOST_SECONDS)

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""
        del request
        if self._num_open == 0:  # idle time says nothing about the rate
            self._since = self._clock()
            self._ends.clear()
        self._num_open += 1

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""

    def on_tokens(self, num_tokens: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`. Rejected requests say nothing about the rate."""
        self._num_open -= 1
        if request.error is None:
            if len(self._ends) == self._ends.maxlen:
                self._since = self._ends[0]
            self._ends.append(timestamp)
