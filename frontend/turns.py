"""Turns of an event loop: long work is done in slices, between which everything else on the loop goes on.

A piece of work is all that one party asks for at once, such as a body's prompts. It may do one item in each turn of the
loop, and more while the budget of that turn lasts, which all pieces of work share.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, Self, TypeVar

T = TypeVar("T")

SLICE_SECONDS = 0.002  # of long work in one turn of the loop
_WOKEN = 8  # tasks of one piece of work that go on in one turn


class LoopWork:
    """A piece of work of `tenant`; its tasks, if it has several, take turns in the order in which they ask."""

    __slots__ = ("last_turn", "tenant", "waiting")

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self.last_turn = -1  # in which it has done something
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait until the next item may be done, which should take less than a millisecond."""
        turns = _turns()
        if not turns.may_run(self):
            await turns.wait(self)

    def in_turns(self, items: Iterable[T]) -> InTurns[T]:
        """Yield the items, each when it may be done."""
        return InTurns(self, items)


class InTurns(Generic[T]):
    """An asynchronous iterator that yields each item when its work may do it."""

    def __init__(self, work: LoopWork, items: Iterable[T]) -> None:
        self._work = work
        self._items = iter(items)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        await self._work.turn()
        try:
            return next(self._items)
        except StopIteration:
            raise StopAsyncIteration from None


class TenantQueue(Generic[T]):
    """A queue from which tenants take turns, each in the order of its own items."""

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}  # by tenant, the one whose turn it is first

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, tenant: str, item: T) -> None:
        """Add an item."""
        self._items.setdefault(tenant, deque()).append(item)

    def take(self, may: Callable[[str], bool] = lambda _tenant: True) -> T | None:
        """Remove and return the next item of the first tenant that `may` have one, None if there is none."""
        tenant = next(filter(may, self._items), None)
        if tenant is None:
            return None
        own = self._items.pop(tenant)
        item = own.popleft()
        if own:
            self._items[tenant] = own
        return item


class LoopTurns:
    """The turns of one event loop, counted while there is work."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._number = 0
        self._is_open = False  # this turn has a budget
        self._end = 0.0
        self._waiting: dict[LoopWork, None] = {}

    def may_run(self, work: LoopWork) -> bool:
        """Return whether `work` may run now."""
        if not self._is_open:
            self._begin()
        if work.waiting or (work.last_turn == self._number and time.monotonic() >= self._end):
            return False
        work.last_turn = self._number
        return True

    async def wait(self, work: LoopWork) -> None:
        """Wait for a turn in which `work` may do something."""
        waiter = self.loop.create_future()
        work.waiting.append(waiter)
        self._waiting[work] = None
        await waiter

    def _begin(self) -> None:
        """Give this turn a budget, and the next one if somebody waits for it."""
        self._is_open = True
        self._number += 1
        self._end = time.monotonic() + SLICE_SECONDS
        self.loop.call_soon(self._next)

    def _next(self) -> None:
        self._is_open = False
        if self._waiting:
            self._begin()
            self._wake()

    def _wake(self) -> None:
        """Wake those that go on in the next turn."""
        works = list(self._waiting)
        first = self._number % len(works)  # the first uses up the budget
        for work in works[first:] + works[:first]:
            for _ in range(min(_WOKEN, len(work.waiting))):
                if not (waiter := work.waiting.popleft()).done():  # else its task was cancelled
                    waiter.set_result(None)
            if not work.waiting:
                del self._waiting[work]


_local = threading.local()
_current: ContextVar[LoopWork] = ContextVar("work")


def _turns() -> LoopTurns:
    """Return the turns of the running loop."""
    loop = asyncio.get_running_loop()
    turns: LoopTurns | None = getattr(_local, "turns", None)
    if turns is None or turns.loop is not loop:
        turns = _local.turns = LoopTurns(loop)
    return turns


def current_work(tenant: str = "") -> LoopWork:
    """Return the work that the running task belongs to; a new piece, of `tenant`, unless `doing` has begun one."""
    return _current.get(None) or LoopWork(tenant)


def in_turns(items: Iterable[T]) -> InTurns[T]:
    """Yield the items, each when the work of the running task may do it."""
    return InTurns(current_work(), items)


async def free(items: list[T] | None) -> None:
    """Empty a list that nobody else reads, of items with many objects each; all at once it would take a long turn."""
    async for item in in_turns(_popped(items or [])):
        del item


def _popped(items: list[T]) -> Iterator[T]:
    while items:
        yield items.pop()


@contextmanager
def doing(work: LoopWork) -> Iterator[None]:
    """Count what happens here, in tasks that start here too, as one piece of work."""
    token = _current.set(work)
    try:
        yield
    finally:
        _current.reset(token)
