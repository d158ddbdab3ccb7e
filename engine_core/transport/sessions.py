"""The engine's side of all sessions, without a socket: greetings, what clients may send, outputs, heartbeats."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire.engine_core.transport.access import Identity, objection
from quire.engine_core.transport.clients import (
    MAX_CALLS,
    ClientId,
    ClientLimits,
    Clients,
    ServerCounters,
    Transmit,
)
from quire.protocol.codec import EngineDecoder
from quire.protocol.errors import FrameTooLargeError, ProtocolError
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    ClientMessage,
    EngineCoreRequest,
    EngineGoodbye,
    EngineMessage,
    ErrorMessage,
    Goodbye,
    Hello,
    KvMessage,
    Ping,
    Pong,
    Ready,
    UtilityCall,
    UtilityResult,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """Functions of the engine that the socket's thread calls, beside the loop's inbox.

    `reject` returns the answer to a request for which there is no room; None accepts it. `is_open` returns True if a
    client's request with this id has been accepted, and has not ended: aborts of others are dropped. `receive_kv`
    receives KvMessages. `report_sent` is called when a PrefixReport to a client has left.
    """

    reject: Callable[[ClientId, EngineCoreRequest], EngineMessage | None] = lambda _client_id, _request: None
    is_open: Callable[[ClientId, str], bool] = lambda _client_id, _request_id: True
    receive_kv: Callable[[ClientId, KvMessage], None] = lambda _client_id, _message: None
    report_sent: Callable[[ClientId], None] = lambda _client_id: None


class ClientSessions:
    """The sessions of all clients: what arrives is passed to `receive`, frames leave by `transmit`, time is told.

    `put` receives EngineCoreRequest, Abort, UtilityCall, KvFetch, WatchPrefixes, KvPeers and Goodbye, each with its
    client.
    Goodbye is put as well for a client that went silent, vanished or does not read. Hello and Ping are answered here.
    """

    def __init__(
        self,
        ready: Ready,
        put: Callable[[tuple[ClientId, ClientMessage]], None],
        engine: EngineCallbacks,
        *,
        transmit: Transmit,
        step_age: Callable[[float], float],
        counters: ServerCounters,
        limits: ClientLimits,
    ) -> None:
        """`step_age` returns the seconds since the last step, at a time."""
        self.next_beat = math.inf
        self._ready = ready
        self._put = put
        self._engine = engine
        self._step_age = step_age
        self._counters = counters
        self._silence = limits.silent_heartbeats * ready.heartbeat_seconds
        self._max_clients = limits.max_clients
        self._decoder = EngineDecoder()
        self._clients = Clients(transmit, put, engine.report_sent, counters, limits.max_waiting_bytes)

    @property
    def blocked(self) -> int:
        """Number of clients for which something waits; `flush` tries them again."""
        return self._clients.blocked

    def flush(self) -> None:
        """Try again to send what waits."""
        self._clients.flush()

    def receive(self, client_id: ClientId, frames: list[bytes], identify: Callable[[], Identity], now: float) -> None:
        """Take a message of a client, whose identity `identify` returns."""
        self._clients.heard(client_id, now)
        try:
            message = self._decoder.decode(frames)
        except ProtocolError as error:
            self._reject_frame(client_id, error)
            return
        if isinstance(message, Hello):
            self._greet(client_id, message, identify(), now)
        else:
            self._accept(client_id, message, now)

    def send(self, client_id: ClientId, message: EngineMessage) -> None:
        """Send a message of the loop, or let it wait."""
        if isinstance(message, UtilityResult):
            self._clients.end_call(client_id)
        self._clients.deliver(client_id, message)

    def beat(self, now: float) -> None:
        """Remove silent clients, and tell the others that the engine is alive; due at `next_beat`."""
        heartbeat = self._ready.heartbeat_seconds
        if (late := now - self.next_beat) > heartbeat:  # the process was stopped, or the host asleep
            self._clients.extend_heartbeats(late, now)
        self._clients.remove_silent(now - self._silence)
        self._clients.broadcast(self._pong(now))
        self.next_beat = now + heartbeat if self._clients else math.inf

    def say_goodbye(self, goodbye: EngineGoodbye) -> None:
        """Tell all clients that the engine ends, or gives way."""
        self._clients.broadcast(goodbye)

    def _reject_frame(self, client_id: ClientId, error: ProtocolError) -> None:
        self._counters.frames_refused += 1
        self._counters.frames_oversized += isinstance(error, FrameTooLargeError)
        _LOG.debug("rejected a frame of client %s: %s", client_id.hex(), error)
        self._clients.deliver(client_id, ErrorMessage(str(error)))

    def _accept(self, client_id: ClientId, message: ClientMessage, now: float) -> None:
        identity = self._clients.identity(client_id)
        if identity is None:
            text = "the engine does not know this connection (new, lost meanwhile, or given up); say Hello first"
            self._clients.deliver(client_id, ErrorMessage(text, fatal=True))
        elif isinstance(message, Ping):
            self._clients.deliver(client_id, self._pong(now))
        elif isinstance(message, Goodbye):
            self._clients.remove(client_id, message)
        elif (answer := objection(identity, message) or self._reject(client_id, identity, message)) is not None:
            self._clients.deliver(client_id, answer)
        elif isinstance(message, KvMessage):
            self._engine.receive_kv(client_id, message)
        elif isinstance(message, Abort):
            self._abort(client_id, message)
        else:
            self._put((client_id, message))

    def _abort(self, client_id: ClientId, message: Abort) -> None:
        """Pass on what there is to abort: of messages that mean nothing, any number may come."""
        if request_ids := [each for each in message.request_ids if self._engine.is_open(client_id, each)]:
            self._put((client_id, Abort(request_ids)))

    def _reject(self, client_id: ClientId, identity: Identity, message: ClientMessage) -> EngineMessage | None:
        """Return the answer to a request or a call for which there is no room; None accepts the message."""
        if isinstance(message, UtilityCall) and not self._clients.begin_call(client_id):
            text = f"{MAX_CALLS} utility calls of this client have no answer yet; wait for some"
            return UtilityResult(message.call_id, error=text)
        if not isinstance(message, EngineCoreRequest):
            return None
        message.tenant = message.tenant or identity.tenant
        return self._engine.reject(client_id, message)

    def _greet(self, client_id: ClientId, hello: Hello, identity: Identity, now: float) -> None:
        if (text := _incompatible(client_id, hello)) is not None:
            self._clients.deliver(client_id, ErrorMessage(text, fatal=True))
            return
        if len(self._clients) >= self._max_clients and self._clients.identity(client_id) is None:
            self._counters.clients_rejected += 1
            text = (
                f"the engine has {self._max_clients} clients, which is its limit; close some, or start it with a "
                "higher --max-clients and limit of open files (ulimit -n)"
            )
            self._clients.deliver(client_id, ErrorMessage(text, fatal=True))
            return
        if not self._clients:
            self.next_beat = now + self._ready.heartbeat_seconds
        self._clients.add(client_id, identity, now)
        self._clients.deliver(client_id, msgspec.structs.replace(self._ready, role=identity.role))
        _LOG.info("client %s (%.80r) attached as %s", client_id.hex(), hello.client_name, identity.role)

    def _pong(self, now: float) -> Pong:
        return Pong(self._step_age(now))


def _incompatible(client_id: ClientId, hello: Hello) -> str | None:
    """Return why this client cannot be served; None if it can."""
    if hello.protocol_version != PROTOCOL_VERSION:
        return (
            f"the client speaks protocol version {hello.protocol_version}, this engine version {PROTOCOL_VERSION}; "
            "install the same version of quire on both sides"
        )
    if not client_id.startswith(b"\0"):  # libzmq's own ids do
        return f"the client chose its zmq identity {client_id!r}, as another may do too; leave ZMQ_IDENTITY unset"
    return None
