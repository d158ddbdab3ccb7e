"""Work that holds the event loop for milliseconds, such as decoding a long body: a piece at a time, with pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from quire.frontend.turns import TenantQueue

T = TypeVar("T")

LONG_BODY = 64 << 10
"""Bytes; work on a longer body takes turns with other such work."""

_LEAST_PAUSE = 0.001  # seconds
_PAUSES = 2  # times what the piece took


class RunPiece(Protocol):
    """Runs a piece of work, sooner or later."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return what `work` returns."""
        ...


async def at_once(work: Callable[[], T]) -> T:
    """Run a piece of work at once."""
    return work()


class LongWork:
    """Runs pieces of work one after the other, with the owners in turn, and pauses twice as long as the pieces.

    They need the interpreter all the time, so that threads can't help. In the pauses streams go on: their increments
    take several turns of the loop, and of the thread that receives them, and so does the rest of the work on the body.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: TenantQueue[Callable[[], None]] = TenantQueue()
        self._is_pausing = False

    def runner(self, owner: str, size: int) -> RunPiece:
        """Return what runs the work of `owner` on a body of `size` bytes."""

        def run(work: Callable[[], T]) -> Awaitable[T]:
            return self._run(owner, work)

        return at_once if size <= LONG_BODY else run

    async def _run(self, owner: str, work: Callable[[], T]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.put(owner, partial(_perform, work, done))
        if not self._is_pausing:
            self._next()
        try:
            return await done
        finally:
            del done  # which an error's traceback would refer to by this frame, for the garbage collector to find

    def _next(self) -> None:
        work = self._waiting.take()
        self._is_pausing = work is not None
        if work is not None:
            began = self._clock()
            work()
            asyncio.get_running_loop().call_later(max(_LEAST_PAUSE, _PAUSES * (self._clock() - began)), self._next)


def _perform(work: Callable[[], T], done: asyncio.Future[T]) -> None:
    if done.cancelled():
        return
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
        done.set_exception(error)
        del done, work  # as in `LongWork._run`
