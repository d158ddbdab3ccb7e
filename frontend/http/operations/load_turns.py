"""Turns of the requests to load adapters: one at a time, a few wait, and none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from quire.frontend.http.errors import ApiError

MAX_OPEN = 8
"""Requests that may be in one step of loading, the download or the check of the configuration."""

T = TypeVar("T")


class LoadTurns:
    """Works on adapters that clients have named, one after the other.

    A client that leaves, or has waited for too long, leaves behind work that goes on; it counts until it ends.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._turn = asyncio.Lock()
        self._num_open = 0  # works that go on, and requests that wait for their turn

    async def work(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Return the result of what `begin` begins, when it is its turn. Raises `ApiError` 429 and 503."""
        if self._num_open >= MAX_OPEN:
            raise ApiError(
                429,
                f"{self._num_open} requests to load adapters are in {self._what}, and no more may; send this one again "
                "when some have ended",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self._num_open += 1
        task: asyncio.Future[T] | None = None
        try:
            async with asyncio.timeout(self._seconds), self._turn:
                task = asyncio.ensure_future(begin())
                task.add_done_callback(self._end)
                return await asyncio.shield(task)
        except TimeoutError:
            state = "has not ended" if task is not None else "has not begun, since others are before it,"
            raise ApiError(
                503,
                f"{self._what} of this adapter {state} after {self._seconds:g} s; send this request again later",
                code="unavailable",
                headers={"Retry-After": "60"},
            ) from None
        finally:
            if task is None:
                self._num_open -= 1

    def _end(self, task: asyncio.Future[Any]) -> None:
        self._num_open -= 1
        if not task.cancelled():
            task.exception()  # nobody may be there any more to raise it
