"""Threads for work on long texts, so that an event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from quire.frontend.text.prompts import LONG_TEXT
from quire.frontend.turns import TenantQueue, current_work

T = TypeVar("T")

_VERY_LONG = 16 * LONG_TEXT


class FairThreads:
    """Threads on which tenants take turns, with the work of each in order.

    One tenant has all threads but one at most, so that short work of another need not wait for its long work. The
    threads end when this object is collected.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)
        self._most_of_one = max(1, count - 1)
        self._lock = threading.Lock()  # of what follows
        self._waiting: TenantQueue[_Job] = TenantQueue()
        self._num_running: Counter[str] = Counter()

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, called on a thread when it is the turn of the running task's tenant."""
        job = _Job(current_work().tenant, work)
        with self._lock:
            self._waiting.put(job.tenant, job)
        self._threads.submit(self._work)
        try:
            result: T = await asyncio.wrap_future(job.future)
        finally:
            del job  # which an error's traceback would refer to by this frame, for the garbage collector to find
        return result

    def close(self) -> None:
        """Let no more work begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while (job := self._waiting.take()) is not None:
                job.future.cancel()

    def _work(self) -> None:
        """Do what may be done. A thread that leaves work behind has found its tenants busy; theirs go on with it."""
        while (job := self._take()) is not None:
            try:
                job.run()
            finally:
                with self._lock:
                    self._num_running[job.tenant] -= 1
                    self._num_running += Counter()  # drops those of none

    def _take(self) -> _Job | None:
        with self._lock:
            job = self._waiting.take(lambda tenant: self._num_running[tenant] < self._most_of_one)
            if job is not None:
                self._num_running[job.tenant] += 1
            return job


class _Job:
    """Work of a tenant, and its result."""

    def __init__(self, tenant: str, work: Callable[[], Any]) -> None:
        self.tenant = tenant
        self.future: Future[Any] = Future()
        self._work = work

    def run(self) -> None:
        """Do the work, unless nobody waits for it any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            self.future.set_exception(error)
            del self  # which the error's traceback refers to, and would keep for the garbage collector
        else:
            self.future.set_result(result)


class TextThreads:
    """Runs work on short input at once, and on long input on threads.

    Tokenizing takes up to 200 bytes of memory for each byte of a text, so there is one thread for very long input,
    and three for the rest, which do not wait for it. Work in Python has one thread: several would only take the
    interpreter from one another, and most of it from the event loop. They end when this object is collected.
    """

    def __init__(self) -> None:
        self._long = FairThreads(3, "quire-text")
        self._very_long = FairThreads(1, "quire-long-text")
        self._python = FairThreads(1, "quire-python")

    async def run(self, work: Callable[[], T], *given: Any) -> T:
        """Return `work()`, whose cost grows with the size of what is `given`."""
        size = size_of(given, _VERY_LONG)
        if size <= LONG_TEXT:
            return work()
        return await (self._long if size < _VERY_LONG else self._very_long).run(work)

    async def run_python(self, work: Callable[[], T], size: int) -> T:
        """Return `work()`, which is done in Python; its cost grows with `size`, in entries or characters."""
        return work() if size <= LONG_TEXT else await self._python.run(work)


def size_of(given: Any, most: int) -> int:
    """Return the characters of all texts plus the entries of all lists and dicts, counted up to about `most`."""
    size, waiting = 0, [given]
    while waiting and size < most:
        value = waiting.pop()
        if isinstance(value, (str, bytes, list, tuple, dict)):
            size += len(value)
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif not isinstance(value, (str, bytes)) and value and not isinstance(value[0], int):  # not token ids
                waiting.extend(value)
    return size
