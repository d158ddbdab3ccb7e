"""The client of an engine: a `Connection` on a thread of its own, for both `LLM` and `AsyncLLM`.

The thread sends heartbeats whatever the user's code does, so that an idle notebook or a blocked event
loop stays a live client. What arrives for requests is passed to one callback, a frame at a time.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.frontend.client.connection import Connection
from quire.frontend.client.routing import FIRST_SESSION, Session
from quire.frontend.errors import EngineConnectionError, EngineDeadError
from quire.protocol.codec import encode
from quire.protocol.host import HOST, Host
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
    PrefixReport,
    Ready,
    Reload,
    SchedulerStats,
    StepTrace,
    UtilityCall,
    UtilityResult,
)

SILENT_HEARTBEATS = 10  # consecutive heartbeats without a message from the engine, after which it counts as dead
_RETRY_SECONDS = 0.02  # between attempts to reach an engine that is gone, for the first so many of them
_QUICK_ATTEMPTS = 1000
_LATE_RETRY_SECONDS = 0.5
_HANDSHAKE_SECONDS = 5.0  # for an engine that has come back
_MOVED, _LOST = "the engine gives way to a new one", "the connection to the engine was lost"
_AWAY_SECONDS = 0.1  # between notices that there is still no engine


@dataclass(frozen=True, slots=True)
class EngineAway:
    """Notice that an engine is gone with all it had, for `reason`; repeated until there is one again.

    `is_loss`: it has not given way in order to another one in its place.
    """

    reason: str
    engine: int = 0
    is_loss: bool = True


@dataclass(frozen=True, slots=True)
class EngineBack:
    """Notice that there is an engine again: the client is in a new session, in which nothing has been sent yet.

    `block_size`: tokens of the engine's KV pages. `address`: where other engines can reach it.
    """

    session: Session
    block_size: int = 1
    address: str = ""


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """Notice that an engine is not used any more, for `reason`, whether it is gone or not."""

    reason: str
    engine: int


@dataclass(frozen=True, slots=True)
class EngineRefusal:
    """Notice that an engine has rejected a message: all its open requests end with `error`, but others may follow."""

    error: EngineDeadError
    engine: int = 0


class EngineMovedError(EngineConnectionError):
    """The engine gives way to another one in its place."""


Connect = Callable[[str, Security], Connection]
"""How a connection is made to an address, with the security of its socket."""

# Outputs of the engine, how the engine fares, what it has cached, or the error that ends every open request and the
# client.
Delivery = EngineCoreOutputs | EngineAway | EngineBack | EngineLeft | EngineRefusal | PrefixReport | EngineDeadError


@dataclass(frozen=True, slots=True)
class ReconnectPolicy:
    """Times for which a client waits for another engine when there is none.

    `timeout`: seconds after which it gives up; 0: at once. `final_report` returns why the engine does not come back,
    None if it may. With `outlives_engine` it also waits for the next one after an engine that has ended in order.
    `longest_step` returns the seconds without the end of a step after which an engine counts as lost, although there is
    something to do, until it steps again.
    """

    timeout: float = 0.0
    final_report: Callable[[], EngineDeadError | None] = lambda: None
    outlives_engine: bool = False
    longest_step: Callable[[], float] = lambda: math.inf


NO_RECONNECT = ReconnectPolicy()


class CoreClient:
    """One client of the engine at `address`, ready to use once constructed.

    `deliver` is called on the client's thread and must return at once. It gets every `EngineCoreOutputs`; an
    `EngineAway` when the engine is gone and `EngineBack` when there is one again, which begins a new session; and an
    `EngineDeadError` when there will be none. The client is unusable once `dead` is set.
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
        reconnect: ReconnectPolicy = NO_RECONNECT,
        engine: int = 0,
        is_started: bool = True,
        host: Host = HOST,
        connect: Connect = Connection,
    ) -> None:
        """`engine`: the number that deliveries have for it. Unless `is_started`, `start` begins the deliveries."""
        self.address = address
        self._engine = engine
        self.dead: EngineDeadError | None = None
        self.last_stats: SchedulerStats | None = None
        self.last_step_age = 0.0
        self._deliver = deliver
        self._security = security or Security()
        self._policy = reconnect
        self._host = host
        self._new_connection = connect
        self._hello = Hello(PROTOCOL_VERSION, f"quire.frontend {os.getpid()}")
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count(1)
        # Notified of each session and of the end. Guards what follows: nothing is posted to a session that is over.
        self._lock = threading.Condition()
        self._session = FIRST_SESSION.number
        self._away: str | None = None  # why there is no engine
        self._num_moves = 0  # sessions that ended because the engine gave way to another one
        self._closing = host.event()
        self._on_step: Callable[[StepTrace], None] | None = None
        self._connection, self.ready = self._connect(timeout)
        self._thread = host.thread("quire-client", self._run)
        if is_started:
            self.start()

    def start(self) -> None:
        """Begin to deliver; once."""
        self._thread.start()

    @property
    def away(self) -> str | None:
        """Reason for which there is no engine now, although one may come back; None if there is one."""
        return self._away

    @property
    def session(self) -> Session:
        """The present session, or the next one while there is no engine."""
        return Session(self._engine, self._session)

    @property
    def num_losses(self) -> int:
        """Times that the engine, or the connection to it, was lost; not when another one took its place."""
        return self._session - FIRST_SESSION.number - self._num_moves

    def send(self, message: ClientMessage, session: Session | None = None) -> None:
        """Queue a message for the engine, unless its `session` is over. Any thread.

        Raises `EngineDeadError`, `ProtocolError` if it is too large.
        """
        frames = encode(message)
        with self._lock:
            if self.dead is not None:
                raise EngineDeadError(*self.dead.args)
            if self._away is None and session in (None, self.session):
                self._connection.post(frames)
            elif session is None:
                raise EngineDeadError(f"{self._away}; it is being started again, try again then")

    def call(
        self,
        method: str,
        token_ids: Sequence[int] = (),
        cache_salt: str = "",
        reload: Reload | None = None,
        shown: Mapping[int, int] | None = None,
    ) -> Future[Any]:
        """Start a utility call; some calls take a prefix, one the arguments of a reload, one what a tree shows.

        The future gets its result, a `RuntimeError` with the engine's message, or `EngineDeadError`.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        call_id = next(self._call_ids)
        self._calls[call_id] = future
        try:
            self.send(UtilityCall(call_id, method, list(token_ids), cache_salt, reload, dict(shown or {})))
        except BaseException:
            self._calls.pop(call_id, None)
            raise
        return future

    def reload(self, arguments: Reload) -> Ready:
        """Have another engine take this one's place, and return its description.

        Raises `RuntimeError` with the reason why none does, and `EngineDeadError`.
        """
        session = self._session
        engine_pid = self.call("reload", reload=arguments).result()["engine_pid"]
        with self._lock:
            self._lock.wait_for(lambda: self.dead is not None or (self._session > session and self._away is None))
        if self.dead is not None:
            raise EngineDeadError(*self.dead.args)
        if self.ready.engine_pid != engine_pid:
            raise RuntimeError(
                "the reload failed: the new engine ended when it took over, and one with the former settings is back"
            )
        return self.ready

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
            self._closing.set()
            if self.dead is None and self._away is None:
                self._connection.wake()
        if self._thread.ident is None:  # it was not started
            self._connection.close()
        elif threading.current_thread() is not self._thread:  # a finalizer may run on any thread
            self._thread.join()

    def _connect(self, timeout: float, *, checks_steps: bool = False) -> tuple[Connection, Ready]:
        """Return a new connection, and the engine's answer to the Hello. Raises `EngineConnectionError`.

        `checks_steps`: an engine that hangs does not count as one.
        """
        connection = self._new_connection(self.address, self._security)
        try:
            return connection, self._shake_hands(connection, timeout, checks_steps)
        except BaseException:
            connection.close()
            raise

    def _shake_hands(self, connection: Connection, timeout: float, checks_steps: bool) -> Ready:
        connection.post(encode(self._hello))
        deadline = self._host.monotonic() + timeout
        ready: Ready | None = None
        while (left := deadline - self._host.monotonic()) > 0:
            for message in connection.exchange(left):
                if isinstance(message, Pong) and ready is not None:
                    self._check_step(message)
                    return ready
                if isinstance(message, Ready):
                    if not checks_steps or self._policy.longest_step() == math.inf:
                        return message
                    ready = message
                    connection.post(encode(Ping()))
                if isinstance(message, (ErrorMessage, EngineGoodbye)):
                    text = message.message if isinstance(message, ErrorMessage) else message.reason
                    raise EngineConnectionError(f"the engine at {self.address} rejected the connection: {text}")
        raise EngineConnectionError(
            f"the engine at {self.address} did not answer within {timeout:g} s; is it an engine, and is it alive?"
        )

    # The methods below run on the client's thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._serve()
                except EngineConnectionError as error:
                    has_moved = isinstance(error, EngineMovedError)
                    lost = EngineDeadError(_MOVED if has_moved else _LOST, str(error))
                    self._leave_session(lost, has_moved)
                    self._reconnect(lost, has_moved)
            dead = EngineDeadError("the client was closed")
        except EngineDeadError as error:
            dead = error
        except Exception as error:  # noqa: BLE001 - whatever it is, no request may wait forever
            dead = EngineDeadError(
                "the connection to the engine failed", f"{self.address}: {type(error).__name__}: {error}"
            )
        self._end(dead)

    def _serve(self) -> None:
        """Exchange messages and heartbeats until the client is closed.

        Raises `EngineConnectionError` if the engine is gone, `EngineDeadError` if it has said so.
        """
        interval = self.ready.heartbeat_seconds
        next_beat = self._host.monotonic() + interval
        missed = 0
        while not self._closing.is_set():
            messages = self._connection.exchange(next_beat - self._host.monotonic())
            for message in messages:
                self._handle(message)
            if messages:
                missed = 0
            if self._host.monotonic() >= next_beat:
                # Heartbeats are counted, not timed: a client that was itself suspended for an hour has missed only one.
                missed += 1
                if missed > SILENT_HEARTBEATS:
                    text = f"the engine at {self.address} has not answered for {missed * interval:g} s"
                    raise EngineConnectionError(text)
                self._connection.post(encode(Ping()))
                next_beat = self._host.monotonic() + interval
        self._connection.post(encode(Goodbye()))

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, EngineCoreOutputs):
            self.last_stats = message.stats or self.last_stats
            self._deliver(message)
        elif isinstance(message, Pong):
            self.last_step_age = message.last_step_age
            self._check_step(message)
        elif isinstance(message, PrefixReport):
            self._deliver(message)
        elif isinstance(message, UtilityResult):
            self._answer(message)
        elif isinstance(message, StepTrace):
            self._trace(message)
        elif isinstance(message, ErrorMessage):
            if message.fatal:  # it has forgotten this client, which was suspended, or was too slow
                raise EngineConnectionError(f"the engine at {self.address} rejected a message: {message.message}")
            # The affected requests are not known, so all of them end.
            error = EngineDeadError("the engine rejected a message", f"{self.address}: {message.message}")
            self._deliver(EngineRefusal(error, self._engine))
        elif isinstance(message, EngineGoodbye) and message.gives_way:
            raise EngineMovedError(f"{self.address}: {message.reason}")
        elif isinstance(message, EngineGoodbye):
            details = f"{self.address}: {message.reason or 'it was stopped'}"
            raise (
                EngineConnectionError(details)
                if self._policy.outlives_engine
                else EngineDeadError("the engine has ended", details)
            )

    def _check_step(self, pong: Pong) -> None:
        """Raise `EngineConnectionError` for an engine that hangs."""
        if pong.last_step_age > self._policy.longest_step():
            raise EngineConnectionError(f"the engine at {self.address} has not stepped for {pong.last_step_age:.0f} s")

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

    def _leave_session(self, lost: EngineDeadError, has_moved: bool) -> None:
        with self._lock:
            self._away = lost.summary
            self._session += 1
            self._num_moves += has_moved
        self._connection.close()
        self._fail_calls(EngineDeadError(f"{lost.summary}, and the call with it", lost.details))

    def _reconnect(self, lost: EngineDeadError, has_moved: bool) -> None:
        """Wait for an engine, and begin a session with it. Raises `EngineDeadError` if none comes."""
        if self._policy.timeout == 0:
            raise lost
        left = self._policy.timeout
        next_notice, num_attempts = 0.0, 0
        while not self._closing.is_set():
            if (report := self._policy.final_report()) is not None:
                raise report
            if (now := self._host.monotonic()) >= next_notice:
                self._deliver(EngineAway(lost.summary, self._engine, not has_moved))
                next_notice = now + _AWAY_SECONDS
            try:
                connection, ready = self._connect(min(_HANDSHAKE_SECONDS, max(0.0, left)), checks_steps=True)
            except EngineConnectionError:
                if left <= 0:
                    summary = f"{lost.summary}, and no engine has come back within {self._policy.timeout:g} s"
                    raise EngineDeadError(summary, lost.details) from None
                num_attempts += 1
                self._closing.wait(_RETRY_SECONDS if num_attempts < _QUICK_ATTEMPTS else _LATE_RETRY_SECONDS)
                # Longer than that it has not waited, but was itself suspended.
                left -= min(self._host.monotonic() - now, _HANDSHAKE_SECONDS + _LATE_RETRY_SECONDS)
            else:
                self._begin_session(connection, ready)
                return

    def _begin_session(self, connection: Connection, ready: Ready) -> None:
        """Go on with an engine that reads the same tokens as text. Raises `EngineDeadError` if it does not."""
        same = ("text_files", "vocab_size", "eos_token_ids")
        if any(getattr(ready, name) != getattr(self.ready, name) for name in same):
            connection.close()
            raise EngineDeadError(
                "the engine has gone, and the one in its place has another model with another tokenizer; connect to it "
                "anew",
                f"{self.address}: {ready.model} in place of {self.ready.model}",
            )
        with self._lock:
            self._connection, self.ready, self._away = connection, ready, None
            self._lock.notify_all()
        self._deliver(EngineBack(self.session, ready.block_size, self.address))
        if self._on_step is not None:
            self.call("trace_start")

    def _end(self, error: EngineDeadError) -> None:
        with self._lock:
            self.dead = error
            is_away, self._away = self._away is not None, None
            self._lock.notify_all()
        if not is_away:
            self._connection.close()
        self._fail_calls(error)
        if not self._closing.is_set():
            self._deliver(error)

    def _fail_calls(self, error: EngineDeadError) -> None:
        for call_id in list(self._calls):
            if (future := self._calls.pop(call_id, None)) is not None:
                future.set_exception(error)
