"""The engine's IO thread: owns the ROUTER, passes frames to the sessions, and what the step loop hands over."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial

import zmq

from quire.engine_core.transport.access import ANYONE, OWNER, Identity
from quire.engine_core.transport.clients import ClientId, ClientLimits, Sent, ServerCounters
from quire.engine_core.transport.connections import Connections
from quire.engine_core.transport.sessions import ClientSessions, EngineCallbacks
from quire.engine_core.transport.waker import Waker
from quire.protocol.address import ipc_path, remove_address
from quire.protocol.codec import Frame
from quire.protocol.keys import NO_KEYS, Gate, Security, authorized_clients
from quire.protocol.messages import (
    ClientMessage,
    EngineGoodbye,
    EngineMessage,
    Goodbye,
    Ready,
    Role,
)
from quire.protocol.sockets import bind_engine

__all__ = ["ClientId", "ClientLimits", "EngineCallbacks", "EngineServer", "Inbox", "ServerCounters"]

Inbox = queue.SimpleQueue[tuple[ClientId, ClientMessage]]

_RETRY_SECONDS = 0.01  # libzmq reports that some client can take a message, not which one
_RECEIVE_SECONDS = 1e-3  # then outputs have their turn,
_DEAF_FACTOR = 2  # and for so many times as long nothing is received: the step loop needs the interpreter too
_MOST_DEAF_SECONDS = 0.01
_CATCH_UP_SECONDS = 0.05  # in which whole messages that are left are received, or found to be too many again

_LOG = logging.getLogger(__name__)


def _descriptor(sender: zmq.Frame) -> int:
    """Return the descriptor by which a frame came, -1 if libzmq does not know it any more."""
    try:
        return int(sender.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class EngineServer:
    """The engine's IO thread.

    It moves frames between the ROUTER and the `ClientSessions` of its clients, who put messages into the inbox.

    `last_step` is set by the step loop: `time.monotonic()` after each step, `math.inf` before it blocks idle.
    `failure` is the exception that ended the thread, if one did; then `(b"", Goodbye)` is put into the inbox so that
    the loop wakes, and `send` raises RuntimeError.
    """

    def __init__(
        self,
        address: str,
        ready: Ready,
        inbox: Inbox,
        limits: ClientLimits,
        security: Security = NO_KEYS,
    ) -> None:
        """`address` may be `tcp://host:0`. Pong comes every `ready.heartbeat_seconds`.

        Fewer clients may be attached than the limit if this process may not open as many files.
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
        self._limits = limits
        self._outgoing: deque[tuple[ClientId, EngineMessage]] = deque()
        self._farewell: tuple[float, EngineGoodbye] | None = None  # with its deadline
        self._deaf_until = 0.0
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="quire-engine-io", daemon=True)

    @property
    def address(self) -> str:
        """The address on which the engine listens; after `start` with the port resolved."""
        return self._address

    def start(self, engine: EngineCallbacks) -> None:
        """Bind and start the thread, which asks the `engine` about messages.

        Raises AddressError or KeyFileError with a text for the user.
        """
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
        limits = self._limits
        self._connections = Connections(self._router, limits.max_clients, limits.memory_limit)
        self._sessions = ClientSessions(
            self._ready,
            self._inbox.put,
            engine,
            transmit=self._transmit,
            step_age=self._step_age,
            counters=self.counters,
            limits=replace(limits, max_clients=self._connections.max_clients),
        )
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
        """Send what waits and EngineGoodbye to all, and wait until clients disconnect, for at most `linger` seconds;
        remove the socket file."""
        self._end(linger, EngineGoodbye(reason))

    def give_way(self, linger: float = 1.0) -> None:
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
            poller, deaf_poller = zmq.Poller(), zmq.Poller()
            gate = [self._gate.socket] if self._gate else []
            for readable in (self._connections.events, self._waker.receiver, *gate):
                poller.register(readable, zmq.POLLIN)
                deaf_poller.register(readable, zmq.POLLIN)
            poller.register(self._router, zmq.POLLIN)
            while self._farewell is None:
                now = time.monotonic()
                readable_now = (deaf_poller if now < self._deaf_until else poller).poll(self._timeout(now))
                self._turn({key for key, _ in readable_now})
            self._say_farewell(*self._farewell)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop must learn of it, not wait forever
            _LOG.exception("the engine's IO thread failed")
            self.failure = error
            self._inbox.put((b"", Goodbye("the IO thread failed")))
        finally:
            self._close()

    def _timeout(self, now: float) -> int | None:
        """Return the milliseconds until something is due; None when only a socket can bring work."""
        due = self._sessions.next_beat - now
        if self._sessions.blocked:
            due = min(due, _RETRY_SECONDS)
        if now < self._deaf_until:
            due = min(due, self._deaf_until - now)
        return None if due == math.inf else max(0, math.ceil(due * 1000))

    def _turn(self, readable: set[object]) -> None:
        if self._gate is not None and self._gate.socket in readable:
            self._gate.answer()
        if self._connections.events in readable:
            self._connections.update()
        self._sessions.flush()
        if self._waker.receiver.fileno() in readable:
            self._waker.lower()
            self._send_outgoing()
        if self._router in readable:
            self._receive()
        if (now := time.monotonic()) >= self._sessions.next_beat:
            self._sessions.beat(now)

    def _send_outgoing(self) -> None:
        for _ in range(len(self._outgoing)):  # not what comes meanwhile: a busy core must not keep us from receiving
            self._sessions.send(*self._outgoing.popleft())

    def _receive(self) -> None:
        """Receive for a while. libzmq takes the clients in turn, and makes those wait that send more than that."""
        begun = now = time.monotonic()
        receive, unfinished = self._sessions.receive, self._connections.unfinished
        while now - begun < _RECEIVE_SECONDS:
            try:
                sender = self._router.recv(zmq.NOBLOCK, copy=False)  # a copy would not know the client's key
            except zmq.Again:
                return
            unfinished.note_message(_descriptor(sender), now)
            receive(sender.bytes, self._router.recv_multipart(), partial(self._identify, sender), now)
            now = time.monotonic()
        unfinished.judges_from = now + _CATCH_UP_SECONDS
        if self.last_step != math.inf:  # the loop is at work
            self._deaf_until = now + min(_DEAF_FACTOR * (now - begun), _MOST_DEAF_SECONDS)

    def _identify(self, sender: zmq.Frame) -> Identity:
        """Return the identity of the client that sent this frame."""
        if self._gate is None:
            return ANYONE if ipc_path(self._address) is None else OWNER
        key, role = self._gate.identify(sender)
        return OWNER if role is Role.ADMIN else Identity(role, tenant=key)

    def _transmit(self, client_id: ClientId, frames: list[Frame]) -> Sent:
        try:  # without copies where they would take long
            self._router.send_multipart((client_id, *frames), zmq.NOBLOCK, copy=len(frames) == 1)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.YES

    def _step_age(self, now: float) -> float:
        return max(0.0, now - self.last_step)

    def _say_farewell(self, deadline: float, goodbye: EngineGoodbye) -> None:
        self._send_outgoing()
        self._sessions.say_goodbye(goodbye)
        while self._sessions.blocked and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
            self._sessions.flush()
        self._connections.wait_closed(deadline)  # libzmq loses what a peer has not read when it finds the end
        self._connections.close()
        self._router.close(linger=max(100, math.ceil((deadline - time.monotonic()) * 1000)))

    def _close(self) -> None:
        self._connections.unfinished.stop()
        del self._sessions  # or server and core would keep each other in memory
        self._context.destroy(linger=None)
        self._waker.close()
        if self._farewell is None or not self._farewell[1].gives_way:
            remove_address(self._address)
