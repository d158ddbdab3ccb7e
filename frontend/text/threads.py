"""Threads for work on long texts, so that an event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.frontend.text.prompts import LONG_TEXT

T = TypeVar("T")

_VERY_LONG = 16 * LONG_TEXT


class TextThreads:
    """Runs work on short input at once, and on long input on threads.

    Tokenizing takes up to 200 bytes of memory for each byte of a text, so there is one thread for very long input,
    and two for the rest, which do not wait for it. They end when this object is collected.
    """

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(2, "quire-text")
        self._very_long = ThreadPoolExecutor(1, "quire-long-text")

    async def run(self, work: Callable[[], T], *given: Any) -> T:
        """Return `work()`, whose cost grows with the size of what is `given`."""
        size = size_of(given, _VERY_LONG)
        if size <= LONG_TEXT:
            return work()
        executor = self._long if size < _VERY_LONG else self._very_long
        return await asyncio.get_running_loop().run_in_executor(executor, work)


def size_of(given: Any, most: int) -> int:
    """Return the characters of all texts plus the entries of all lists and dicts, counted up to about `most`."""
    size, waiting = 0, [given]
    while waiting and size < most:
        value = waiting.pop()
        if isinstance(value, (str, bytes, list, tuple, dict)):
            size += len(value)
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif not isinstance(value, (str, bytes)) and size < most:
                waiting.extend(value)
    return size
