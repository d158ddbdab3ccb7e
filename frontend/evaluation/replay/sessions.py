"""Sessions, whose requests wait for the previous turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.frontend.evaluation.replay.record import RunClock
from quire.frontend.evaluation.workload.request import WorkloadRequest


class _Turn:
    """The last request of a session so far; `ended` is in seconds since the run began."""

    __slots__ = ("ended", "over")

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.ended = 0.0


class Sessions:
    """Last turn of each session."""

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._turns: dict[str, _Turn] = {}

    def must_wait(self, request: WorkloadRequest) -> bool:
        """Return True if an earlier turn of the request's session has begun and not ended. Safe on any thread."""
        turn = None if request.session is None else self._turns.get(request.session)
        return turn is not None and not turn.over.is_set()

    @asynccontextmanager
    async def turn(self, request: WorkloadRequest, due: float) -> AsyncIterator[float]:
        """Wait for the request's turn, which lasts as long as the `with`; yield the time at which it may be sent.

        That is `due`, or `delay` after the end of the previous turn, if that is later.
        """
        if request.session is None:
            yield due
            return
        before, own = self._turns.get(request.session), _Turn()
        self._turns[request.session] = own
        try:
            if before is not None:
                await before.over.wait()
                due = max(due, before.ended + request.delay)
                await asyncio.sleep(max(0.0, due - self._clock.now()))
            yield due
        finally:
            own.ended = self._clock.now()
            own.over.set()
