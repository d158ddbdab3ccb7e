"""The memory of request bodies that are arriving, shared by the addresses that they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.frontend.http.errors import ApiError
from quire.protocol.resident_memory import trim_heap

_TRIM_BYTES = 64 << 20  # of bodies, after which free memory is given back to the system; that takes some 5 ms


class ArrivingBodies:
    """Counts the bytes of bodies that are arriving, by address. In all they may have `limit` bytes.

    Once they have, an address can add to its bodies only up to its share, an equal part of the limit for each address.
    So one that sends bodies and ends none takes no memory from the others, and all stay below twice the limit. `trim`
    gives back what is free in the process.
    """

    def __init__(self, limit: int, trim: Callable[[], None] = trim_heap) -> None:
        self._limit = limit
        self._trim = trim
        self._num_freed = 0  # bytes, since memory was given back
        self._by_address: Counter[str] = Counter()  # without those that have none
        self._total = 0

    @contextmanager
    def body(self, address: str) -> Iterator[Callable[[int], None]]:
        """Count a body that arrives in the body of the `with`; it yields a function that counts further bytes.

        The function raises `ApiError` 503 if there is no memory for them.
        """
        size = 0

        def grow(num_bytes: int) -> None:
            nonlocal size
            self._check(address, num_bytes)
            size += num_bytes
            self._total += num_bytes
            self._by_address[address] += num_bytes

        try:
            yield grow
        finally:
            self._total -= size
            self._by_address[address] -= size
            if not self._by_address[address]:
                del self._by_address[address]
            self._free(size)

    def _free(self, num_bytes: int) -> None:
        self._num_freed += num_bytes
        if self._num_freed >= _TRIM_BYTES:
            self._num_freed = 0
            self._trim()

    def _check(self, address: str, num_bytes: int) -> None:
        if self._total + num_bytes <= self._limit:
            return
        num_addresses = len(self._by_address) + (address not in self._by_address)
        if (self._by_address[address] + num_bytes) * num_addresses > self._limit:
            raise ApiError(
                503,
                f"the server is overloaded: bodies of {self._total} bytes are arriving, {self._by_address[address]} of "
                f"them from this address, and {self._limit} are allowed in all; send fewer at once, or try again later",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
