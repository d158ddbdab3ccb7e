"""The requests that have a time limit, by when it is up."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from quire.engine_core.request import Request

_FEW = 64  # that need not be looked through


class Deadlines:
    """A heap. Those that end before their time are forgotten when they are more than the others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._most = _FEW

    def add(self, request: Request) -> None:
        """Takes a request, if it has a limit."""
        if request.deadline == math.inf:
            return
        heapq.heappush(self._heap, (request.deadline, request.number, request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if not entry[2].status.is_finished]
            heapq.heapify(self._heap)
            self._most = max(_FEW, 2 * len(self._heap))

    def late(self, now: float) -> Iterator[Request]:
        """Takes out those whose time is up, and which have not ended."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.status.is_finished:
                yield request

    def __len__(self) -> int:
        return len(self._heap)
