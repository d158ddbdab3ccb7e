"""The engine's clients as its IO thread sees them: their connections, and the messages that wait for them."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire.engine_core.transport.access import Identity
from quire.engine_core.transport.outbox import NUMBER_BYTES, Outbox
from quire.protocol.codec import Frame, encode
from quire.protocol.errors import ProtocolError
from quire.protocol.messages import EngineMessage, ErrorMessage, Goodbye, PrefixReport, StepTrace, UtilityResult

ClientId = bytes
"""The ROUTER's id of one connection; a client that reconnects has a new one."""

MAX_CALLS = 1024
"""Utility calls of a client that have no answer yet."""

_BATCH_VALUES = 250_000  # of merged outputs in one frame: some 2 MB

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of what the clients of an engine may take of it.

    A client that sends nothing for `silent_heartbeats`, and does not read, counts as dead. With `max_clients`, others
    are rejected. When more than about `max_waiting_bytes` wait to be read, the client for which the most waits is
    dropped. `memory_limit`: bytes of the process, see `UnfinishedMessages`.
    """

    silent_heartbeats: int = 10
    max_clients: int = 1024
    max_waiting_bytes: int = 512 << 20
    memory_limit: float = math.inf


class ServerCounters(msgspec.Struct):
    """Counts of the IO thread; for the utility call `stats`."""

    clients: int = 0
    clients_rejected: int = 0
    frames_refused: int = 0
    frames_oversized: int = 0
    clients_silent: int = 0
    clients_gone: int = 0
    clients_slow: int = 0
    outputs_merged: int = 0
    traces_dropped: int = 0
    messages_dropped: int = 0


class Sent(enum.Enum):
    """Outcome of sending a message."""

    YES = enum.auto()
    FULL = enum.auto()  # the client does not read
    GONE = enum.auto()  # the connection is closed


Transmit = Callable[[ClientId, list[Frame]], Sent]
"""Send the frames of a message to a client, or not; never block."""


class _Client:
    """One client. While it does not read, `frames` wait to be sent and `outbox` holds what follows it."""

    __slots__ = ("counted", "frames", "heard", "id", "identity", "num_calls", "outbox", "sends_report")

    def __init__(self, client_id: ClientId, identity: Identity, heard: float) -> None:
        self.id = client_id
        self.identity = identity
        self.heard = heard
        self.frames: list[Frame] | None = None  # of one message
        self.sends_report = False  # the last message that was encoded is a PrefixReport
        self.outbox = Outbox()
        self.num_calls = 0  # that have no answer yet
        self.counted = 0  # of `waiting`, in the sum of all clients

    @property
    def waiting(self) -> int:
        """Memory of what waits for it, in numbers."""
        return self.outbox.waiting + sum(len(frame) for frame in self.frames or ()) // NUMBER_BYTES


class Clients:
    """The table of clients, and what waits for them. Used by the IO thread only."""

    def __init__(
        self,
        transmit: Transmit,
        on_leave: Callable[[tuple[ClientId, Goodbye]], None],
        on_report_sent: Callable[[ClientId], None],
        counters: ServerCounters,
        max_waiting_bytes: int,
    ) -> None:
        """Frames leave by `transmit`. `on_leave` is called once for each client that leaves, whatever the reason.

        `on_report_sent` is called when a PrefixReport to a client has left.
        """
        self._transmit = transmit
        self._on_leave = on_leave
        self._on_report_sent = on_report_sent
        self._counters = counters
        self._max_waiting_values = max_waiting_bytes // NUMBER_BYTES
        self._num_waiting_values = 0
        self._clients: dict[ClientId, _Client] = {}
        self._blocked: dict[ClientId, _Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def identity(self, client_id: ClientId) -> Identity | None:
        """Return the identity of a client; None if it is unknown."""
        client = self._clients.get(client_id)
        return None if client is None else client.identity

    @property
    def blocked(self) -> int:
        """Number of clients that have something waiting; `flush` tries them again."""
        return len(self._blocked)

    def add(self, client_id: ClientId, identity: Identity, now: float) -> None:
        """Add a client that has said Hello; a second Hello changes nothing."""
        self._clients.setdefault(client_id, _Client(client_id, identity, now))
        self._counters.clients = len(self._clients)

    def remove(self, client_id: ClientId, goodbye: Goodbye) -> None:
        """Remove a client, the only way that one leaves. What waits for it is dropped."""
        self._num_waiting_values -= self._clients.pop(client_id).counted
        self._blocked.pop(client_id, None)
        self._counters.clients = len(self._clients)
        self._on_leave((client_id, goodbye))
        _LOG.info("client %s left: %.80r", client_id.hex(), goodbye.reason)

    def begin_call(self, client_id: ClientId) -> bool:
        """Count a utility call that the loop is to answer; return False if the client has too many."""
        client = self._clients[client_id]
        if client.num_calls >= MAX_CALLS:
            return False
        client.num_calls += 1
        return True

    def end_call(self, client_id: ClientId) -> None:
        """Note that the loop has answered a call."""
        if (client := self._clients.get(client_id)) is not None:
            client.num_calls -= 1

    def heard(self, client_id: ClientId, now: float) -> None:
        """Note that a client has sent something, and so is alive."""
        if (client := self._clients.get(client_id)) is not None:
            client.heard = now

    def extend_heartbeats(self, seconds: float, now: float) -> None:
        """Excuse the clients' silence while the engine itself did not run, for `seconds`."""
        for client in self._clients.values():
            client.heard = min(now, client.heard + seconds)

    def remove_silent(self, since: float) -> None:
        """Remove the clients that have sent nothing after `since` and read nothing either.

        A client whose interpreter is busy for a while sends no heartbeat, but libzmq's own thread goes on reading.
        """
        for client in [client for client in self._blocked.values() if client.heard < since]:
            self._counters.clients_silent += 1
            self.remove(client.id, Goodbye("silent"))

    def broadcast(self, message: EngineMessage) -> None:
        """Deliver a message to all clients."""
        for client_id in list(self._clients):
            self.deliver(client_id, message)

    def deliver(self, client_id: ClientId, message: EngineMessage) -> None:
        """Send a message or let it wait; never block. An unknown client gets errors only, and only if it reads."""
        client = self._clients.get(client_id)
        if client is None:
            sent = isinstance(message, ErrorMessage) and self._transmit(client_id, encode(message)) is Sent.YES
            self._counters.messages_dropped += not sent
        elif client.frames is None:
            self._push(client, message)
        else:
            self._keep(client, message)

    def flush(self) -> None:
        """Try again to send what waits."""
        for client in list(self._blocked.values()):
            self._flush(client)
            if client.id in self._clients:
                self._count(client)

    def _flush(self, client: _Client) -> None:
        sent = client.frames is None or self._send_frames(client, client.frames)
        while sent:
            message = client.outbox.take(_BATCH_VALUES)
            if message is None:
                del self._blocked[client.id]
                return
            sent = self._push(client, message)

    def _push(self, client: _Client, message: EngineMessage) -> bool:
        """Send a message; return True if the client can take another."""
        try:
            frames = encode(message)
        except ProtocolError as error:
            return self._report(client, message, error)
        client.sends_report = isinstance(message, PrefixReport)
        return self._send_frames(client, frames)

    def _send_frames(self, client: _Client, frames: list[Frame]) -> bool:
        sent = self._transmit(client.id, frames)
        client.frames = frames if sent is Sent.FULL else None
        if sent is Sent.FULL:
            self._blocked[client.id] = client
        elif sent is Sent.GONE:
            self._counters.clients_gone += 1
            self.remove(client.id, Goodbye("gone"))
        elif client.sends_report:
            self._on_report_sent(client.id)
        return sent is Sent.YES

    def _keep(self, client: _Client, message: EngineMessage) -> None:
        if isinstance(message, StepTrace):
            self._counters.traces_dropped += client.outbox.put_trace(message)
        else:
            self._counters.outputs_merged += client.outbox.put(message)
        self._count(client)
        while self._num_waiting_values > self._max_waiting_values:
            slowest = max(self._blocked.values(), key=lambda client: client.counted)
            self._counters.clients_slow += 1
            self.remove(slowest.id, Goodbye(f"slow: {slowest.counted} numbers wait to be read"))

    def _count(self, client: _Client) -> None:
        """Bring the sum of what waits up to date, when something waits for a client or no longer does."""
        self._num_waiting_values += client.waiting - client.counted
        client.counted = client.waiting

    def _report(self, client: _Client, message: EngineMessage, error: ProtocolError) -> bool:
        """Report a message of the engine that has no encoding: a bug, which must be seen and survived."""
        _LOG.error("a message to client %s was not sent: %s", client.id.hex(), error)
        if isinstance(message, UtilityResult):
            return self._push(client, UtilityResult(message.call_id, error=f"the result cannot be sent: {error}"))
        self._transmit(client.id, encode(ErrorMessage(f"the engine lost an output: {error}", fatal=True)))
        self.remove(client.id, Goodbye("an output to it has no encoding"))
        return False
