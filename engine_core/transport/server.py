"""The engine's IO thread: owns the ROUTER, decodes into the inbox, sends what the step loop hands over."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from quire.engine_core.transport.access import ANYONE, OWNER, Identity, objection
from quire.engine_core.transport.clients import MAX_CALLS, ClientId, Clients, ServerCounters
from quire.engine_core.transport.connections import Connections
from quire.engine_core.transport.outbox import NUMBER_BYTES
from quire.engine_core.transport.waker import Waker
from quire.protocol.address import ipc_path, remove_address
from quire.protocol.codec import EngineDecoder
from quire.protocol.errors import FrameTooLargeError, ProtocolError
from quire.protocol.keys import NO_KEYS, Gate, Security, authorized_clients
from quire.protocol.messages import (
    PROTOCOL_VERSION,
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
    Role,
    UtilityCall,
    UtilityResult,
)
from quire.protocol.sockets import bind_engine

__all__ = ["ClientId", "EngineServer", "Inbox", "ServerCounters"]

Inbox = queue.SimpleQueue[tuple[ClientId, ClientMessage]]

Reject = Callable[[ClientId, EngineCoreRequest], EngineMessage | None]
"""Return the answer to a request for which there is no room; None lets it in."""

_RETRY_SECONDS = 0.01  # libzmq reports that some client can take a message, not which one
_RECEIVE_AT_ONCE = 256  # then outputs have their turn

_LOG = logging.getLogger(__name__)


def _let_in(_client_id: ClientId, _request: EngineCoreRequest) -> None:
    return None


def _ignore(_client_id: ClientId, _message: KvMessage) -> None:
    return None


class EngineServer:
    """The engine's IO thread.

    The inbox receives EngineCoreRequest, Abort, UtilityCall, KvFetch and Goodbye, each with the id of its client.
    Goodbye is put there as well for a client that went silent, vanished or does not read. Hello and Ping are answered
    here.

    `last_step` is set by the step loop: `time.monotonic()` after each step, `math.inf` before it blocks idle.
    `failure` is the exception that ended the thread, if one did; then `(b"", Goodbye)` is put into the inbox so that
    the loop wakes, and `send` raises RuntimeError.
    """

    def __init__(
        self,
        address: str,
        ready: Ready,
        inbox: Inbox,
        security: Security = NO_KEYS,
        *,
        silent_heartbeats: int = 10,
        max_clients: int = 1024,
        max_waiting_bytes: int = 512 << 20,
    ) -> None:
        """`address` may be `tcp://host:0`. Pong comes every `ready.heartbeat_seconds`.

        A client that sends nothing for `silent_heartbeats` of them, and does not read, counts as dead. When more than
        about `max_waiting_bytes` wait to be read, the client for which the most waits is dropped. With `max_clients`,
        others are rejected; fewer may be attached if this process may not open as many files.
        """
        if not ready.heartbeat_seconds > 0:
            raise ValueError(f"heartbeat_seconds={ready.heartbeat_seconds} must be above 0")
        self.last_step = time.monotonic()
        self.failure: BaseException | None = None
        self.counters = ServerCounters()
        self._address = address
        self._ready = ready
        self._inbox = inbox
        self._security = security
        self._silence = silent_heartbeats * ready.heartbeat_seconds
        self._max_clients = max_clients
        self._max_waiting_values = max_waiting_bytes // NUMBER_BYTES
        self._decoder = EngineDecoder()
        self._outgoing: deque[tuple[ClientId, EngineMessage]] = deque()
        self._next_beat = math.inf
        self._farewell: tuple[float, EngineGoodbye] | None = None  # with its deadline
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="quire-engine-io", daemon=True)

    @property
    def address(self) -> str:
        """The address on which the engine listens; after `start` with the port resolved."""
        return self._address

    def start(self, reject: Reject = _let_in, receive_kv: Callable[[ClientId, KvMessage], None] = _ignore) -> None:
        """Bind and start the thread, which asks `reject` about every request, and hands KvMessages to `receive_kv`.

        Raises AddressError or KeyFileError with a text for the user.
        """
        self._reject_request = reject
        self._receive_kv = receive_kv
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: Gate | None = None
        try:
            if self._security.keys is not None:
                self._gate = Gate(self._context, authorized_clients(self._security.keys))
            self._router = bind_engine(self._context, self._address, self._security)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._address = self._router.get_string(zmq.LAST_ENDPOINT)
        self._connections = Connections(self._router, self._max_clients)
        self._clients = Clients(self._router, self._inbox.put, self.counters, self._max_waiting_values)
        self._thread.start()

    def send(self, client_id: ClientId, message: EngineMessage) -> None:
        """Hand a message over, from any thread; never block. Do not change the message afterwards.

        Messages to a client that has left are dropped. Raises RuntimeError if the IO thread failed.
        """
        if self.failure is not None:
            raise RuntimeError("the engine's IO thread failed; the engine cannot answer any more") from self.failure
        self._outgoing.append((client_id, message))
        self._waker.wake()

    def stop(self, linger: float = 1.0, reason: str = "the engine was stopped") -> None:
        """Send what waits, for at most `linger` seconds, and EngineGoodbye to all; remove the socket file."""
        self._end(linger, EngineGoodbye(reason))

    def give_way(self, linger: float = 0.1) -> None:
        """Do so for an engine that takes this one's place: the folder of the socket file stays."""
        self._end(linger, EngineGoodbye("another engine takes its place", gives_way=True))

    def _end(self, linger: float, goodbye: EngineGoodbye) -> None:
        if self._thread.ident is None:  # never started
            self._waker.close()
            return
        self._farewell = self._farewell or (time.monotonic() + linger, goodbye)
        self._waker.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            gate = [self._gate.socket] if self._gate else []
            for readable in (self._router, self._connections.events, self._waker.receiver, *gate):
                poller.register(readable, zmq.POLLIN)
            while self._farewell is None:
                self._turn({key for key, _ in poller.poll(self._timeout())})
            self._say_farewell(*self._farewell)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop must learn of it, not wait forever
            _LOG.exception("the engine's IO thread failed")
            self.failure = error
            self._inbox.put((b"", Goodbye("the IO thread failed")))
        finally:
            self._close()

    def _timeout(self) -> int | None:
        """Return the milliseconds until something is due; None when only a socket can bring work."""
        due = self._next_beat - time.monotonic()
        if self._clients.blocked:
            due = min(due, _RETRY_SECONDS)
        return None if due == math.inf else max(0, math.ceil(due * 1000))

    def _turn(self, readable: set[object]) -> None:
        if self._gate is not None and self._gate.socket in readable:
            self._gate.answer()
        if self._connections.events in readable:
            self._connections.update()
        self._clients.flush()
        if self._waker.receiver.fileno() in readable:
            self._waker.lower()
            self._send_outgoing()
        if self._router in readable:
            self._receive()
        if (now := time.monotonic()) >= self._next_beat:
            self._beat(now)

    def _send_outgoing(self) -> None:
        for _ in range(len(self._outgoing)):  # not what comes meanwhile: a busy core must not keep us from receiving
            client_id, message = self._outgoing.popleft()
            if isinstance(message, UtilityResult):
                self._clients.end_call(client_id)
            self._clients.deliver(client_id, message)

    def _receive(self) -> None:
        now = time.monotonic()
        for _ in range(_RECEIVE_AT_ONCE):
            try:
                sender = self._router.recv(zmq.NOBLOCK, copy=False)  # a copy would not know the client's key
            except zmq.Again:
                return
            client_id = sender.bytes
            self._clients.heard(client_id, now)
            try:
                message = self._decoder.decode(self._router.recv_multipart())
            except ProtocolError as error:
                self._reject_frame(client_id, error)
                continue
            if isinstance(message, Hello):
                self._greet(client_id, message, self._identify(sender), now)
            else:
                self._accept(client_id, message, now)

    def _reject_frame(self, client_id: ClientId, error: ProtocolError) -> None:
        self.counters.frames_refused += 1
        self.counters.frames_oversized += isinstance(error, FrameTooLargeError)
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
            self._receive_kv(client_id, message)
        else:
            self._inbox.put((client_id, message))

    def _reject(self, client_id: ClientId, identity: Identity, message: ClientMessage) -> EngineMessage | None:
        """Return the answer to a request or a call for which there is no room; None lets the message in."""
        if isinstance(message, UtilityCall) and not self._clients.begin_call(client_id):
            text = f"{MAX_CALLS} utility calls of this client have no answer yet; wait for some"
            return UtilityResult(message.call_id, error=text)
        if not isinstance(message, EngineCoreRequest):
            return None
        message.tenant = message.tenant or identity.tenant
        return self._reject_request(client_id, message)

    def _identify(self, sender: zmq.Frame) -> Identity:
        """Return the identity of the client that sent this frame."""
        if self._gate is None:
            return ANYONE if ipc_path(self._address) is None else OWNER
        key, role = self._gate.identify(sender)
        return OWNER if role is Role.ADMIN else Identity(role, tenant=key)

    def _greet(self, client_id: ClientId, hello: Hello, identity: Identity, now: float) -> None:
        if (text := _incompatible(client_id, hello)) is not None:
            self._clients.deliver(client_id, ErrorMessage(text, fatal=True))
            return
        most = self._connections.max_clients
        if len(self._clients) >= most and self._clients.identity(client_id) is None:
            self.counters.clients_rejected += 1
            text = (
                f"the engine has {most} clients, which is its limit; close some, or start it with a "
                "higher --max-clients and limit of open files (ulimit -n)"
            )
            self._clients.deliver(client_id, ErrorMessage(text, fatal=True))
            return
        if not self._clients:
            self._next_beat = now + self._ready.heartbeat_seconds
        self._clients.add(client_id, identity, now)
        self._clients.deliver(client_id, msgspec.structs.replace(self._ready, role=identity.role))
        _LOG.info("client %s (%.80r) attached as %s", client_id.hex(), hello.client_name, identity.role)

    def _beat(self, now: float) -> None:
        """Remove silent clients, and tell the others that the engine is alive."""
        heartbeat = self._ready.heartbeat_seconds
        if (late := now - self._next_beat) > heartbeat:  # the process was stopped, or the host asleep
            self._clients.extend_heartbeats(late, now)
        self._clients.remove_silent(now - self._silence)
        self._clients.broadcast(self._pong(now))
        self._next_beat = now + heartbeat if self._clients else math.inf

    def _pong(self, now: float) -> Pong:
        return Pong(max(0.0, now - self.last_step))

    def _say_farewell(self, deadline: float, goodbye: EngineGoodbye) -> None:
        self._send_outgoing()
        self._clients.broadcast(goodbye)
        while self._clients.blocked and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
            self._clients.flush()
        self._connections.close()
        self._router.close(linger=max(100, math.ceil((deadline - time.monotonic()) * 1000)))

    def _close(self) -> None:
        self._reject_request, self._receive_kv = _let_in, _ignore  # or server and core would keep each other in memory
        self._context.destroy(linger=None)
        self._waker.close()
        if self._farewell is None or not self._farewell[1].gives_way:
            remove_address(self._address)


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
