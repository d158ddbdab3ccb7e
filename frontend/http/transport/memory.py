"""The memory of the server's process, which new requests must not take beyond a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.frontend.http.errors import ApiError
from quire.protocol.resident_memory import ResidentMemory, trim_heap

_SAMPLE_SECONDS = 0.1
_TRIM_SECONDS = 5.0  # between two times that memory is given back, since that may take milliseconds


class MemoryCeiling:
    """Admits requests with a body while the process is below `limit` bytes, and one at a time beyond.

    `read` returns the resident bytes; `trim` gives back what is free in the process; `clock`: seconds.
    """

    def __init__(
        self,
        limit: int,
        *,
        read: Callable[[], int] | None = None,
        trim: Callable[[], None] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._read = read or ResidentMemory().read
        self._trim = trim
        self._clock = clock
        self._num_open = 0
        self._resident = 0
        self._next_look = 0.0
        self._next_trim = 0.0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a request open. Raises `ApiError` 503 if there is no memory for it."""
        self._num_open += 1
        try:
            self.check()
            yield
        finally:
            self._num_open -= 1

    def check(self) -> None:
        """Raise `ApiError` 503 if the process is beyond its limit and a request is open besides this one."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + _SAMPLE_SECONDS
            self._resident = self._read()
            if self._resident > self._limit and now >= self._next_trim:
                self._next_trim = now + _TRIM_SECONDS
                self._trim()
                self._resident = self._read()
        if self._resident > self._limit and self._num_open > 1:
            raise ApiError(
                503,
                f"the server is overloaded: its process takes {self._resident} bytes of memory, and may take "
                f"{self._limit}; try again later, or start it with a higher --server-memory-limit",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
