"""The connections of the engine's socket, whether or not they say Hello."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from quire.engine_core.transport.unfinished import UnfinishedMessages
from quire.protocol.open_files import allow_connections

_STRANGERS = 256  # connections beyond the clients: of those that are being rejected, or say nothing
_MOST_FILES = 1 << 16  # room for connections that libzmq accepts before the events of others are taken

_LOG = logging.getLogger(__name__)


class Connections:
    """Counts connections by libzmq's events, and shuts those down that are too many.

    With no file descriptor left, libzmq could not accept: it ends the process over ipc://, and spins over tcp://.
    """

    def __init__(self, router: zmq.Socket[Any], max_clients: int, memory_limit: float = math.inf) -> None:
        """Watch a bound ROUTER. Fewer than `max_clients` fit if the process may not open as many files.

        `memory_limit`: bytes of the process, beyond which no message may go on without an end.
        """
        allowed = allow_connections(_MOST_FILES)
        self._most = max(1, min(max_clients + _STRANGERS, allowed // 2))
        self.max_clients = min(max_clients, self._most)
        self._router = router
        self._open: set[int] = set()
        self.unfinished = UnfinishedMessages(memory_limit)
        self.events: zmq.Socket[Any] = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def update(self) -> set[int]:
        """Take libzmq's events. Return the file descriptors of connections that were closed."""
        closed, num_shut_down = set(), 0
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart())
            fd = event["value"]
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(fd)
                self.unfinished.discard(fd)
                closed.add(fd)
                continue
            self._open.add(fd)
            self.unfinished.add(fd)
            if len(self._open) > self._most:
                _shut_down(fd)
                num_shut_down += 1
        if num_shut_down:
            _LOG.warning("%d connections are open, and no more may be; %d were shut down", self._most, num_shut_down)
        return closed

    def wait_closed(self, deadline: float) -> None:
        """Wait until those that are open have been closed, at most to `deadline` of the monotonic clock."""
        left = set(self._open)
        while left and (seconds := deadline - time.monotonic()) > 0:
            self.events.poll(math.ceil(seconds * 1000))
            left -= self.update()

    def close(self) -> None:
        """Take no more events; before the ROUTER is closed."""
        self._router.disable_monitor()


def _shut_down(fd: int) -> None:
    """End a connection of libzmq's, which closes it then. If it has closed it already, a later one may have its number.

    None that was accepted before can have it, so clients are safe.
    """
    with contextlib.suppress(OSError):
        peer = socket.socket(fileno=fd)
        try:
            peer.shutdown(socket.SHUT_RDWR)
        finally:
            peer.detach()
