"""The time and the threads that a client and a supervisor use, so that a simulation can have its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


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

    def join(self) -> None:
        """Wait for its end."""


def _daemon(name: str, target: Callable[[], None]) -> Thread:
    return threading.Thread(target=target, name=name, daemon=True)


@dataclass(frozen=True, slots=True)
class Host:
    """The time in seconds; a new event; and a thread to be started, of a name and what it runs."""

    monotonic: Callable[[], float] = time.monotonic
    event: Callable[[], Event] = threading.Event
    thread: Callable[[str, Callable[[], None]], Thread] = _daemon


HOST = Host()
"""This process, as it is."""
