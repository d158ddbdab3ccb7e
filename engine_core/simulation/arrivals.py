"""Times at which requests are sent: their own, or when a user is free and the session's previous turn has ended."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable

from quire.protocol.simulation import SimulatedRequest

_MOST_IDLE = 1 << 17  # sessions without a running or waiting turn whose last end is remembered


class Arrivals:
    """A stream of requests in order of arrival, of which one is read ahead, and the turns that have to wait.

    With `concurrency` it is a closed loop of that many users, each of whom sends the next request when the last ends.
    """

    def __init__(self, requests: Iterable[SimulatedRequest], concurrency: int | None = None) -> None:
        self._stream = iter(requests)
        self._next = next(self._stream, None)
        self._released: list[tuple[float, int, SimulatedRequest]] = []  # a heap, by time and index
        # Sessions with a turn that runs or has a known time: their other turns, with the times at which they are due.
        self._busy: dict[str, deque[tuple[float, SimulatedRequest]]] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()  # the time at which the last turn ended
        self._users = (
            None if concurrency is None else [0.0] * concurrency
        )  # a heap: the times since which users are free

    @property
    def time(self) -> float:
        """Time of the next request that is known of; infinite without any."""
        own = self._due()
        return min(own, self._released[0][0]) if self._released else own

    def _due(self) -> float:
        """Return the time of the stream's next request."""
        if self._next is None:
            return math.inf
        if self._users is None:
            return self._next.arrival
        return self._users[0] if self._users else math.inf

    def pop(self) -> tuple[float, SimulatedRequest] | None:
        """Return the next request and its time, or None if it has to wait. ValueError if the stream is out of order."""
        due = self._due()
        if self._released and self._released[0][0] <= due:
            time, _, released = heapq.heappop(self._released)
            return time, released
        request = self._next
        assert request is not None
        self._read()
        if self._users is not None:
            heapq.heappop(self._users)
        if request.session is None:
            return due, request
        if (turns := self._busy.get(request.session)) is not None:
            turns.append((due, request))
            return None
        self._busy[request.session] = deque()
        ready = self._idle.pop(request.session, -math.inf) + request.delay
        if ready <= due:
            return due, request
        self._release(request, ready)
        return None

    def ended(self, request: SimulatedRequest, time: float) -> None:
        """Note that a request that was sent has ended."""
        if self._users is not None:
            heapq.heappush(self._users, time)
        if request.session is None:
            return
        if turns := self._busy[request.session]:
            due, following = turns.popleft()
            self._release(following, max(due, time + following.delay))
            return
        del self._busy[request.session]
        self._idle[request.session] = time
        if len(self._idle) > _MOST_IDLE:
            self._idle.popitem(last=False)

    def _release(self, request: SimulatedRequest, time: float) -> None:
        heapq.heappush(self._released, (time, request.index, request))

    def _read(self) -> None:
        before, self._next = self._next, next(self._stream, None)
        if before is not None and self._next is not None and self._next.arrival < before.arrival:
            raise ValueError(
                f"request {self._next.index} comes at {self._next.arrival} s, after one that comes at "
                f"{before.arrival} s; send requests in order of arrival"
            )
