"""A connection to an engine: the socket of one session, and the news of its loss."""

from __future__ import annotations

import math
import os
from collections import deque
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.frontend.errors import EngineConnectionError
from quire.protocol.codec import ClientDecoder, Frame
from quire.protocol.keys import Security
from quire.protocol.messages import EngineMessage
from quire.protocol.sockets import connect_client

_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINGER_MS = 500
_MOST_AT_ONCE = 8  # messages: each takes the GIL, for which a busy thread makes this one wait


class Connection:
    """A connection to the engine at `address`. Constructing it does not wait; `exchange` does.

    `post` and `wake` may be called from any thread, everything else from one thread at a time.
    Raises `AddressError` or `KeyFileError` for an address or keys that cannot be used.
    """

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = connect_client(self._context, address, security)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._decoder = ClientDecoder()
        self._outbox: deque[list[Frame]] = deque()
        self._lost: str | None = None
        # The socket reconnects by itself, so only its monitor reports that the engine is gone.
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKE
        )
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def post(self, frames: list[Frame]) -> None:
        """Queue the frames of one message for the next `exchange`. Any thread."""
        self._outbox.append(frames)
        self.wake()

    def wake(self) -> None:
        """Make a running `exchange` return. Any thread."""
        with suppress(BlockingIOError):  # the pipe is full of wake-ups
            os.write(self._wake_write, b"x")

    def exchange(self, timeout: float) -> list[EngineMessage]:
        """Send the queued frames and return the messages that arrive, after at most `timeout` seconds.

        Raises `EngineConnectionError` if the connection is broken, after all earlier messages have been returned.
        """
        if self._lost is not None:
            raise EngineConnectionError(self._lost)
        self.flush()
        self._poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
        events = dict(self._poller.poll(math.ceil(max(0.0, timeout) * 1000)))
        if self._wake_read in events:
            os.read(self._wake_read, 65536)
        if self._monitor in events:
            self._lost = self._explain(recv_monitor_message(self._monitor)["event"])
            return self._receive(math.inf)
        return self._receive(_MOST_AT_ONCE) if self._socket in events else []

    def flush(self) -> None:
        """Send the queued frames, as far as the socket takes them without waiting."""
        while self._outbox:
            frames = self._outbox[0]
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def close(self) -> None:
        """Send the queued frames if that is possible at once, and close. `post` must not be called afterwards."""
        if self._lost is None:
            self.flush()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if self._lost is not None else _LINGER_MS)
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _receive(self, most: float) -> list[EngineMessage]:
        """Return the messages that have arrived, `most` of them at most."""
        messages: list[EngineMessage] = []
        with suppress(zmq.Again):
            while len(messages) < most:
                messages.append(self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK)))
        return messages

    def _explain(self, event: int) -> str:
        if event == zmq.EVENT_CONNECT_RETRIED:
            return f"no engine listens at {self.address}; start an engine there, or check the address"
        if event == zmq.EVENT_DISCONNECTED:
            return f"the engine at {self.address} has gone: it closed the connection"
        return f"the engine at {self.address} rejected the connection; do the CURVE keys belong to this engine?"
