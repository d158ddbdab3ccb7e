"""Messages that do not end: libzmq keeps all parts of one until the last is there, and bounds each part only."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from quire.protocol.resident_memory import ResidentMemory
from quire.protocol.sockets import MAX_READ_BYTES

_SAMPLE_SECONDS = 0.02  # between two samples, while anything arrives
_LEAST_SAMPLES = 3  # that find a message unfinished; an honest one has ended by then, or makes no progress
_LONGEST_SECONDS = 60.0  # of a message by a UNIX socket, of which the kernel counts no bytes
_BYTES_RECEIVED = slice(128, 136)  # of the kernel's struct tcp_info

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Unfinished:
    """A message of which parts have arrived: since when, the bytes counted then, and the samples that found more."""

    since: float
    counted: int
    num_samples: int = 0


class UnfinishedMessages:
    """Watches connections on a thread that sleeps while nothing arrives, and shuts down one whose message does not end.

    Such a message may have `MAX_READ_BYTES`: by tcp as the kernel counts them, by a UNIX socket as this process grows.
    Beyond `memory_limit` bytes of the process, none may go on. Methods may be called by any thread.
    """

    def __init__(self, memory_limit: float, resident: Callable[[], int] | None = None) -> None:
        self._memory_limit = memory_limit
        self._resident = resident or ResidentMemory().read
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._arrivals = select.epoll()
        self._arrivals.register(self._wake, select.EPOLLIN)
        self._last_message: dict[int, float] = {}  # by descriptor: when the last whole message was received
        self._unfinished: dict[int, _Unfinished] = {}
        self.judges_from = 0.0  # set by the owner: before, whole messages are left, which can't be told from unfinished
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-engine-watch", daemon=True)
        self._thread.start()

    def add(self, fd: int) -> None:
        """Watch a connection."""
        self._unfinished.pop(fd, None)
        self._last_message[fd] = time.monotonic()
        with suppress(OSError):  # it is closed already, and the kernel forgets those that are
            self._arrivals.register(fd, select.EPOLLIN | select.EPOLLET)

    def discard(self, fd: int) -> None:
        """Forget a connection that was closed."""
        self._last_message.pop(fd, None)

    def note_message(self, fd: int, now: float) -> None:
        """Note that a whole message was received from a connection."""
        self._last_message[fd] = now

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._arrivals.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            active = {fd for fd, _ in self._arrivals.poll()}
            if self._is_over.wait(_SAMPLE_SECONDS):
                return
            now = time.monotonic()
            if now >= self.judges_from:
                for fd in active:
                    self._sample(fd, now)

    def _sample(self, fd: int, now: float) -> None:
        """Check a connection by which something has come since the last sample."""
        last_message = self._last_message.get(fd)
        if last_message is None:
            self._unfinished.pop(fd, None)
            return
        resident = self._resident()
        known = self._unfinished.get(fd)
        with suppress(OSError), _socket_of(fd) as peer:
            received = _bytes_received(peer)
            counted = resident if received is None else received
            if known is None or known.since <= last_message:
                self._unfinished[fd] = _Unfinished(now, counted)
                return
            known.num_samples += 1
            is_too_old = received is None and now - known.since > _LONGEST_SECONDS
            is_too_large = counted - known.counted > MAX_READ_BYTES or resident > self._memory_limit
            if known.num_samples >= _LEAST_SAMPLES and (is_too_large or is_too_old):
                _LOG.warning(
                    "a connection was shut down: its message of more than %d bytes has not ended after %.1f s",
                    max(0, counted - known.counted), now - known.since,
                )  # fmt: skip
                peer.shutdown(socket.SHUT_RDWR)
                del self._unfinished[fd]


@contextmanager
def _socket_of(fd: int) -> Iterator[socket.socket]:
    """Lend a descriptor of libzmq's as a socket, which stays open. Raises OSError if it is closed."""
    peer = socket.socket(fileno=fd)
    try:
        yield peer
    finally:
        peer.detach()


def _bytes_received(peer: socket.socket) -> int | None:
    """Return the bytes that have ever come by a connection, None where the kernel does not count them."""
    if peer.family == socket.AF_UNIX:
        return None
    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
    return int.from_bytes(info[_BYTES_RECEIVED], "little") if len(info) == _BYTES_RECEIVED.stop else None
