"""The client of an engine: a `Connection` on a thread of its own, for both `LLM` and `AsyncLLM`.

The thread sends heartbeats whatever the user's code does, so that an idle notebook or a blocked event
loop stays a live client. While an extension module keeps all threads from running Python, libzmq's own goes on
reading, which tells the engine that the client lives. What arrives for requests is passed to one callback, a
frame at a time.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.frontend.errors import EngineConnectionError, EngineDeadError
from quire.protocol.codec import ClientDecoder, encode
from quire.protocol.keys import Security
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    EngineCoreOutputs,
    EngineGoodbye,
    EngineMessage,
    ErrorMessage,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Ready,
    SchedulerStats,
    StepTrace,
    UtilityCall,
    UtilityResult,
)
from quire.protocol.sockets import connect_client

_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINGER_MS = 500
_READ_AHEAD = 65_536  # messages, that libzmq's thread reads while Python does not run; a minute of steps


class Connection:
    """A connection to the engine at `address`. Constructing it does not wait; `exchange` does.

    `post` and `wake` may be called from any thread, everything else from one thread at a time.
    Raises `AddressError` or `KeyFileError` for an address or keys that cannot be used.
    """

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = connect_client(self._context, address, security, receive_messages=_READ_AHEAD)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._decoder = ClientDecoder()
        self._outbox: deque[list[bytes]] = deque()
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

    def post(self, frames: list[bytes]) -> None:
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
            return self._receive()
        return self._receive() if self._socket in events else []

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

    def _receive(self) -> list[EngineMessage]:
        messages: list[EngineMessage] = []
        with suppress(zmq.Again):
            while True:
                messages.append(self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK)))
        return messages

    def _explain(self, event: int) -> str:
        if event == zmq.EVENT_CONNECT_RETRIED:
            return f"no engine listens at {self.address}; start an engine there, or check the address"
        if event == zmq.EVENT_DISCONNECTED:
            return f"the engine at {self.address} has gone: it closed the connection"
        return f"the engine at {self.address} rejected the connection; do the CURVE keys belong to this engine?"


SILENT_HEARTBEATS = 10  # consecutive heartbeats without a message from the engine, after which it counts as dead

# Outputs of the engine, or the error that ends every open request.
Delivery = EngineCoreOutputs | EngineDeadError


class CoreClient:
    """One client of the engine at `address`, ready to use once constructed.

    `deliver` is called on the client's thread and must return at once. It gets every `EngineCoreOutputs`, and an
    `EngineDeadError` when all open requests are lost; the client is unusable once `dead` is set.
    `exit_report` returns how the engine process ended, None if it is not known.
    Raises `EngineConnectionError` if no engine answers within `timeout` seconds, or it speaks another version of the
    protocol.
    """

    def __init__(
        self,
        address: str,
        deliver: Callable[[Delivery], None],
        *,
        security: Security | None = None,
        timeout: float = 10.0,
        exit_report: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.address = address
        self.dead: EngineDeadError | None = None
        self.last_stats: SchedulerStats | None = None
        self.last_step_age = 0.0
        self._deliver = deliver
        self._exit_report = exit_report
        self._hello = Hello(PROTOCOL_VERSION, f"quire.frontend {os.getpid()}")
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._lock = threading.Lock()  # no message is posted and no call started once `dead` is set
        self._closing = False
        self._on_step: Callable[[StepTrace], None] | None = None
        self._awaits_ready = False  # a Hello was sent that the engine has not answered yet
        self._connection = Connection(address, security or Security())
        try:
            self.ready = self._shake_hands(timeout)
        except BaseException:
            self._connection.close()
            raise
        self._thread = threading.Thread(target=self._run, name="quire-client", daemon=True)
        self._thread.start()

    def send(self, message: ClientMessage) -> None:
        """Queue a message for the engine. Any thread. Raises `EngineDeadError`, `ProtocolError` if it is too large."""
        frames = encode(message)
        with self._lock:
            if self.dead is not None:
                raise EngineDeadError(*self.dead.args)
            self._connection.post(frames)

    def call(self, method: str, token_ids: Sequence[int] = (), cache_salt: str = "") -> Future[Any]:
        """Start a utility call; some calls take a prefix.

        The future gets its result, or a `RuntimeError` with the engine's message.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        call_id = next(self._call_ids)
        self._calls[call_id] = future
        try:
            self.send(UtilityCall(call_id, method, list(token_ids), cache_salt))
        except BaseException:
            self._calls.pop(call_id, None)
            raise
        return future

    def start_trace(self, on_step: Callable[[StepTrace], None]) -> Future[Any]:
        """Start tracing the engine's steps; `on_step` is called on the client's thread and must return at once."""
        self._on_step = on_step
        return self.call("trace_start")

    def stop_trace(self) -> Future[Any]:
        """Stop tracing; a trace marked as the last follows."""
        return self.call("trace_stop")

    def close(self) -> None:
        """Send a goodbye, so that the engine ends open requests, and end the thread. Idempotent."""
        with self._lock:
            self._closing = True
            if self.dead is None:
                self._connection.wake()
        if threading.current_thread() is not self._thread:  # a finalizer may run on any thread
            self._thread.join()

    def _shake_hands(self, timeout: float) -> Ready:
        self._connection.post(encode(self._hello))
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for message in self._connection.exchange(left):
                if isinstance(message, Ready):
                    return message
                if isinstance(message, (ErrorMessage, EngineGoodbye)):
                    text = message.message if isinstance(message, ErrorMessage) else message.reason
                    raise EngineConnectionError(f"the engine at {self.address} rejected the connection: {text}")
        raise EngineConnectionError(
            f"the engine at {self.address} did not answer within {timeout:g} s; is it an engine, and is it alive?"
        )

    # The methods below run on the client's thread.

    def _run(self) -> None:
        try:
            self._serve()
            reason = "the client was closed"
        except (EngineConnectionError, EngineDeadError) as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, no request may wait forever
            reason = f"the connection to the engine at {self.address} failed: {type(error).__name__}: {error}"
        if not self._closing:
            reason = self._exit_report() or reason
        self._end(EngineDeadError(reason))

    def _serve(self) -> None:
        """Exchange messages and heartbeats until the client is closed. Raises `EngineDeadError`."""
        interval = self.ready.heartbeat_seconds
        next_beat = time.monotonic() + interval
        missed = 0
        while not self._closing:
            messages = self._connection.exchange(next_beat - time.monotonic())
            for message in messages:
                self._handle(message)
            if messages and not self._awaits_ready:
                missed = 0
            if time.monotonic() >= next_beat:
                # Heartbeats are counted, not timed: a client that was itself suspended for an hour has missed only one.
                missed += 1
                if missed > SILENT_HEARTBEATS:
                    raise EngineDeadError(f"the engine at {self.address} has not answered for {missed * interval:g} s")
                self._connection.post(encode(Ping()))
                next_beat = time.monotonic() + interval
        self._connection.post(encode(Goodbye()))

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, EngineCoreOutputs):
            self.last_stats = message.stats or self.last_stats
            self._deliver(message)
        elif isinstance(message, Pong):
            self.last_step_age = message.last_step_age
        elif isinstance(message, UtilityResult):
            self._answer(message)
        elif isinstance(message, StepTrace):
            self._trace(message)
        elif isinstance(message, ErrorMessage):
            self._handle_rejection(message)
        elif isinstance(message, EngineGoodbye):
            raise EngineDeadError(f"the engine at {self.address} has ended: {message.reason or 'it was stopped'}")
        else:
            self.ready, self._awaits_ready = message, False
            if self._on_step is not None:  # the engine may have dropped this client, and its subscription
                self.call("trace_start")

    def _trace(self, message: StepTrace) -> None:
        if self._on_step is not None:
            self._on_step(message)
        if message.last:
            self._on_step = None

    def _answer(self, message: UtilityResult) -> None:
        future = self._calls.pop(message.call_id, None)
        if future is None:
            return
        if message.error is not None:
            future.set_exception(RuntimeError(message.error))
        else:
            future.set_result(message.result)

    def _handle_rejection(self, message: ErrorMessage) -> None:
        """Handle that the engine rejected a frame, or declared this client dead while it was suspended.

        The affected requests are not known, so all of them end with an error, and the client sends a new Hello.
        """
        if not self._awaits_ready:
            self._awaits_ready = True
            self._connection.post(encode(self._hello))
        self._deliver(EngineDeadError(f"the engine at {self.address} rejected a message: {message.message}"))

    def _end(self, error: EngineDeadError) -> None:
        with self._lock:
            self.dead = error
        self._connection.close()
        for call_id in list(self._calls):
            if (future := self._calls.pop(call_id, None)) is not None:
                future.set_exception(error)
        if not self._closing:
            self._deliver(error)
