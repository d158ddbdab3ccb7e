"""Processes that this one starts, all on one thread: the kernel takes that thread for their parent.

A child has the kernel tell it that its parent has died (`quire.protocol.parent_death`), and the kernel does so when the
thread ends that has started it. Threads of users, of event loops and of a supervisor come and go. Nor does a child end
by a signal that means nothing to it, as it inherits the thread's signal mask.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

Child = subprocess.Popen[bytes]

_MEANINGLESS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # to a child, which would end by them


class _Starter:
    """The thread that starts the children, from the first one on; it lives as long as the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._orders: queue.SimpleQueue[tuple[list[str], dict[str, Any], Future[Child]]] = queue.SimpleQueue()
        os.register_at_fork(after_in_child=self._forget)

    def start(self, command: list[str], options: dict[str, Any]) -> Child:
        """Start a child, and return it. Raises OSError."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-children", daemon=True)
                self._thread.start()
        future: Future[Child] = Future()
        self._orders.put((command, options, future))
        try:
            return future.result()
        except KeyboardInterrupt:  # nobody will know the child
            future.add_done_callback(_kill)
            raise

    def _forget(self) -> None:
        """Begin anew in a forked child, which does not have the thread."""
        self._lock, self._thread, self._orders = threading.Lock(), None, queue.SimpleQueue()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _MEANINGLESS)
        while True:
            command, options, future = self._orders.get()
            try:
                future.set_result(subprocess.Popen(command, **options))
            except Exception as error:  # noqa: BLE001 - whoever asks for the process gets it
                future.set_exception(error)
            del future  # with the child, which may be waited for by nobody else


def _kill(future: Future[Child]) -> None:
    with suppress(OSError, ValueError):
        future.result().kill()


_STARTER = _Starter()
_LOCAL = threading.local()  # `note` is called with the children of the thread


def start_child(command: list[str], **options: Any) -> Child:
    """Start a process as `subprocess.Popen` does, by a thread that ends with this process only. Raises OSError."""
    child = _STARTER.start(command, options)
    getattr(_LOCAL, "note", _ignore)(child)
    return child


def _ignore(_child: Child) -> None:
    pass


@contextmanager
def noted_children(note: Callable[[Child], None]) -> Iterator[None]:
    """Call `note` with each child that this thread starts in the body of the `with`."""
    _LOCAL.note = note
    try:
        yield
    finally:
        del _LOCAL.note
