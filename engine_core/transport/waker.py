"""Waking a thread that polls its sockets."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Wakes a thread that polls its sockets: a flag, and a byte on a socket when it goes up.

    The woken thread calls `lower` before it looks for work, so it sees work that was added while the flag was up.
    """

    def __init__(self) -> None:
        self._sender, self.receiver = socket.socketpair()
        self._up = False

    def wake(self) -> None:
        """Make `receiver` readable, if it is not; from any thread."""
        if not self._up:
            self._up = True
            with contextlib.suppress(OSError):  # closed: no thread is left to wake
                self._sender.send(b"\0")

    def lower(self) -> None:
        """Take the byte away, once `receiver` is readable."""
        self.receiver.recv(64)
        self._up = False

    def close(self) -> None:
        """Close both ends; `wake` does nothing from here on."""
        self._up = True
        self._sender.close()
        self.receiver.close()
