"""Virtual time, and processes whose threads are greenlets: one thing happens at a time, in the order of the seed."""

from __future__ import annotations

import contextlib
import heapq
import queue
import random
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import greenlet

from quire.protocol.host import Host

LATENCY = 1e-3  # seconds, at most, until a thread that was woken runs


class KilledError(BaseException):
    """The process is dead: unwinds its threads, which `except Exception` does not stop."""


class World:
    """The clock, what is to happen, and what was found to be wrong."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self.trace: list[str] | None = [] if is_traced else None
        self.check: Callable[[], None] = lambda: None  # after each event
        self.num_events = 0
        self.graves: list[Process] = []  # whose threads are still to be unwound
        self._hub: Any = greenlet.getcurrent()
        self._heap: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._count = 0
        self._suspended = 0.0  # seconds

    @property
    def hub(self) -> Any:
        """The greenlet of `run`."""
        return self._hub

    def log(self, text: str) -> None:
        """Add a line to the trace, if there is one."""
        if self.trace is not None:
            self.trace.append(f"{self.now:10.4f} {text}")

    def fail(self, text: str) -> None:
        """Note that something is wrong."""
        self.log(f"WRONG: {text}")
        self.problems.append(f"at {self.now:.4f} s: {text}")

    def fail_by(self, error: Exception) -> None:
        """Note an error that nobody was to see."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.fail(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno}: {where.line})")
        if self.trace is not None:
            self.trace.append("".join(traceback.format_exception(error)))

    def at(self, when: float, callback: Callable[[], None], process: Process | None = None) -> None:
        """Call back at a time, unless the process is dead by then; once it goes on if it is stopped."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, process, callback))

    def suspend(self, seconds: float) -> None:
        """Let time pass in which nothing happens."""
        self.now += seconds
        self._suspended += seconds

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Let things happen until something is the case; return False if it is not at time `limit`.

        Time in which the host is suspended does not count.
        """
        limit -= self._suspended
        while not until():
            if self.problems or not self._heap or self._heap[0][0] > limit + self._suspended:
                return False
            when, _, process, callback = heapq.heappop(self._heap)
            if process is not None and not process.is_alive:
                continue
            self.now = max(self.now, when)
            if process is not None and process.is_stopped:
                process.missed.append(callback)
                continue
            self.num_events += 1
            self._do(callback)
            while self.graves:
                self.graves.pop().unwind()
            self.check()
        return True

    def _do(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except KilledError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed is to be named
            self.fail_by(error)


class Process:
    """A process: what happens in it ends with it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.missed: list[Callable[[], None]] = []  # while it was stopped
        self.on_death: list[Callable[[], None]] = []
        self.fuse: int | None = None  # it dies at this call of `burn`
        self.threads: list[Thread] = []
        self.host = Host(self.monotonic, self.event, partial(Thread, self), Inbox, renice=lambda _niceness: None)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back in this process."""
        self.world.at(self.world.now + seconds, callback, self)

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back in this process as soon as a thread is scheduled."""
        self.after(LATENCY * self.world.random.random(), callback)

    def burn(self) -> None:
        """Mark a place at which the process may die."""
        if not self.is_alive:
            raise KilledError
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                self.kill("between two lines")
                raise KilledError

    def monotonic(self) -> float:
        """Return the time."""
        self.burn()
        return self.world.now

    def event(self) -> Event:
        """Return a new event."""
        return Event(self.world)

    def stop(self) -> None:
        """Stop all its threads, as SIGSTOP does."""
        self.is_stopped = True
        self.world.log(f"{self.name} is stopped")

    def resume(self) -> None:
        """Let its threads go on."""
        if not self.is_stopped:
            return
        self.is_stopped = False
        self.world.log(f"{self.name} goes on")
        missed, self.missed = self.missed, []
        for callback in missed:
            self.soon(callback)

    def kill(self, why: str) -> None:
        """End it. A thread of its own must raise KilledError then."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.world.log(f"{self.name} dies: {why}")
        self.world.graves.append(self)
        for callback in self.on_death:
            callback()

    def unwind(self) -> None:
        """Unwind the threads of a dead process; on the hub."""
        for thread in self.threads:
            if thread.is_suspended:
                with contextlib.suppress(KilledError):
                    thread.throw(KilledError)


class Thread(greenlet.greenlet):  # type: ignore[misc]
    """A thread of a process."""

    def __init__(self, process: Process, name: str, target: Callable[[], None]) -> None:
        super().__init__(parent=process.world.hub)
        self.process = process
        self.name = name
        self.ident: int | None = None
        self._target = target
        self._ended = process.event()
        self._ticket: int | None = None  # of the present wait
        self._num_waits = 0

    @property
    def is_suspended(self) -> bool:
        """True if it has begun, waits, and has not ended."""
        return bool(self) and not self.dead

    def start(self) -> None:
        """Start it."""
        self.ident = len(self.process.threads) + 1
        self.process.threads.append(self)
        self.process.soon(self.switch)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        """Return True from its start to its end."""
        return self.ident is not None and not self._ended.is_set()

    def run(self) -> None:
        """Run what it is for."""
        self._target()
        self._ended.set()

    def wait(self, seconds: float | None) -> None:
        """Wait for `wake`, for so long at most."""
        process = self.process
        process.burn()
        self._num_waits += 1
        ticket = self._ticket = self._num_waits
        if seconds is not None and seconds < 1e9:
            process.after(max(0.0, seconds), partial(self._go_on, ticket))
        process.world.hub.switch()
        if not process.is_alive:
            raise KilledError

    def wake(self) -> None:
        """Let it go on, if it waits; from any process."""
        if self._ticket is not None:
            self.process.soon(partial(self._go_on, self._ticket))

    def _go_on(self, ticket: int) -> None:
        if self._ticket == ticket:
            self._ticket = None
            self.switch()


def current_thread() -> Thread:
    """Return the running thread."""
    thread = greenlet.getcurrent()
    assert isinstance(thread, Thread)
    return thread


def sleep(seconds: float) -> None:
    """Let the running thread wait."""
    current_thread().wait(seconds)


class Event:
    """A `threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.wake()

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else self._world.now + timeout
        while not self._is_set and (end is None or self._world.now < end):
            thread = current_thread()
            self._waiting.append(thread)
            thread.wait(None if end is None else end - self._world.now)
            self._waiting.remove(thread)
        return self._is_set


class Inbox(queue.SimpleQueue[Any]):
    """A queue on which one thread waits in virtual time."""

    def __init__(self) -> None:
        self._waiting: Thread | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        if self._waiting is not None:
            self._waiting.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.empty():
            self._waiting = current_thread()
            try:
                self._waiting.wait(timeout)
            finally:
                self._waiting = None
        return self.get_nowait()
