"""The time and the threads of a process, so that a simulation can have its own."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Event(Protocol):
    """A `threading.Event`."""

    def is_set(self) -> bool:
        """Return True once it is set."""

    def set(self) -> None:
        """Set it."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for `timeout` seconds at most; return whether it is."""


class Thread(Protocol):
    """A `threading.Thread`."""

    @property
    def ident(self) -> int | None:
        """Its number; None before it is started."""

    def start(self) -> None:
        """Start it."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for `timeout` seconds at most."""

    def is_alive(self) -> bool:
        """Return True from its start to its end."""


def _daemon(name: str, target: Callable[[], None]) -> Thread:
    return threading.Thread(target=target, name=name, daemon=True)


def _renice(niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


@dataclass(frozen=True, slots=True)
class Host:
    """The time in seconds; a new event; a thread to be started, of a name and what it runs; a new queue, on which one
    thread waits; and a way to set the niceness of the thread that calls, which may raise OSError.
    """

    monotonic: Callable[[], float] = time.monotonic
    event: Callable[[], Event] = threading.Event
    thread: Callable[[str, Callable[[], None]], Thread] = _daemon
    queue: Callable[[], queue.SimpleQueue[Any]] = queue.SimpleQueue
    renice: Callable[[int], None] = _renice


HOST = Host()
"""This process, as it is."""
