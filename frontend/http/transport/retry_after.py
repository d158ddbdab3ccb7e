"""How fast the server comes along with its requests: what it tells those that come too many."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from quire.frontend.client.observer import OpenRequest

_MOST_SECONDS = 60
_NUM_RECENT = 64


class RetryAfter:
    """An `Observer` that counts the requests that are open, and knows when the last ones have ended.

    `clock`: seconds, as `time.monotonic()`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._since = clock()  # from then on `_ends` are all there were
        self._ends: deque[float] = deque(maxlen=_NUM_RECENT)

    @property
    def seconds(self) -> int:
        """Whole seconds, 1 to 60, in which those that are open now come to their end if all goes on as it went.

        While none has ended since the engine was idle: as if one did now, since it cannot be sooner.
        """
        seconds = (self._clock() - self._since) * self._num_open / max(1, len(self._ends))
        return min(max(1, math.ceil(seconds)), _MOST_SECONDS)

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""
        del request
        if self._num_open == 0:  # time in which there was nothing to do says nothing
            self._since = self._clock()
            self._ends.clear()
        self._num_open += 1

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""

    def on_tokens(self, num_tokens: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`. Those that were refused say nothing."""
        self._num_open -= 1
        if request.error is None:
            if len(self._ends) == self._ends.maxlen:
                self._since = self._ends[0]
            self._ends.append(timestamp)
