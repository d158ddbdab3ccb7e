"""The engine's main loop: drain the inbox, step, sleep on the inbox when there is nothing to do."""

from __future__ import annotations

import gc
import math
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.engine_core.engine import EngineCore
from quire.engine_core.transport.server import ClientId, Inbox
from quire.protocol.messages import ClientMessage, Ping, UtilityCall

IDLE_SECONDS = 1.0  # longest sleep, after which the loop looks at the time
_LEAST_RECEIVE_SECONDS, _RECEIVE_SECONDS = 0.001, 0.01  # between two steps: a flood delays no running request
_SHUTDOWN = (b"", UtilityCall(0, "shutdown"))  # like a client's call, but from none


class Server(Protocol):
    """The thread of the engine's socket, as far as the loop knows it; `EngineServer` describes both."""

    last_step: float
    failure: BaseException | None


class FairInbox:
    """Messages that the loop has yet to receive: those of one client in order, the clients in turn."""

    def __init__(self) -> None:
        self._by_client: dict[ClientId, deque[ClientMessage]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def put(self, client_id: ClientId, message: ClientMessage) -> None:
        """Add a message."""
        self._by_client.setdefault(client_id, deque()).append(message)

    def take(self) -> tuple[ClientId, ClientMessage]:
        """Remove and return the next message. There must be one."""
        client_id = next(iter(self._by_client))
        own = self._by_client.pop(client_id)
        message = own.popleft()
        if own:
            self._by_client[client_id] = own
        return client_id, message


class EngineLoop:
    """Runs the core until told to end. `drain` and `stop` may be called by signal handlers and other threads."""

    def __init__(
        self,
        core: EngineCore,
        server: Server,
        inbox: Inbox,
        *,
        drain_seconds: float,
        is_supervised: bool = False,
        clock: Callable[[], float] = time.monotonic,
        collect_garbage: Callable[[], object] = gc.collect,
    ) -> None:
        """Under a supervisor, requests outlive a failure. `collect_garbage` is called when idle."""
        self._clock = clock
        self._collect_all = collect_garbage
        self._core = core
        self._server = server
        self._inbox = inbox
        self._received = FairInbox()  # out of the inbox
        self._drain_seconds = drain_seconds
        self.is_supervised = is_supervised
        self._deadline = math.inf
        self._give_way_at = math.inf  # or before, when no request that has begun is left,
        self._leave_from = -math.inf  # but not before this
        self._is_clean = True  # no garbage since the last collection
        self._step_seconds = 0.0  # of the last step

    def drain(self) -> None:
        """Reject new requests; end when the open ones have ended, or after `drain_seconds`."""
        self._inbox.put(_SHUTDOWN)

    def stop(self) -> None:
        """End after the current step."""
        self._deadline = -math.inf
        self._inbox.put(_SHUTDOWN)

    def give_way(self, seconds: float, *, least: float = 0.0) -> None:
        """Start no more requests; leave when those that have begun have ended, or after `seconds`.

        `least`: seconds until then in any case, in which `drain` or `stop` may still end the engine for good.
        """
        now = self._clock()
        self._leave_from = now + least
        self._give_way_at = min(self._give_way_at, now + seconds)
        self._inbox.put((b"", Ping()))  # wakes the loop

    def run(self) -> bool:
        """Run until told to end, and end all requests; or until it gives way, which leaves them to another engine.

        Returns False if it gives way. Raises RuntimeError if the server's thread has failed.
        """
        try:
            while not self._is_over():
                if self._gives_way():
                    self._core.flush()
                    return False
                self._receive()
                begun = self._clock()
                self._core.step()
                self._server.last_step = now = self._clock()
                self._step_seconds = now - begun
        except Exception as error:
            if self._server.failure is None and not self.is_supervised:  # else no client can be reached, or is to be
                self._core.end_all(f"the engine failed: {error}")
            raise
        self._core.drain()
        self._receive_waiting(math.inf)  # to be rejected, not left without an answer
        self._core.end_all()
        return True

    def _gives_way(self) -> bool:
        if self._give_way_at == math.inf or self._core.draining:
            return False
        self._core.stop_starting()
        now = self._clock()
        is_due = now >= self._give_way_at or not self._core.scheduler.has_begun_requests
        return is_due and now >= self._leave_from

    def _is_over(self) -> bool:
        if self._server.failure is not None:
            raise RuntimeError("the thread of the engine's socket has failed") from self._server.failure
        now = self._clock()
        is_drained = False
        if self._core.draining:
            self._deadline = min(self._deadline, now + self._drain_seconds)
            is_drained = not self._core.has_requests and not self._received and self._inbox.empty()
        return is_drained or now >= self._deadline

    def _receive(self) -> None:
        if not self._core.has_work and not self._received:
            self._sleep()
        self._receive_waiting(min(max(_LEAST_RECEIVE_SECONDS, self._step_seconds), _RECEIVE_SECONDS))

    def _receive_waiting(self, seconds: float) -> None:
        """Receive what is there now, for that long; a flood must not keep the loop from stepping."""
        for _ in range(self._inbox.qsize()):
            self._received.put(*self._inbox.get_nowait())
        end = self._clock() + seconds
        while self._received:
            self._core.receive(*self._received.take())
            if self._clock() > end:
                return

    def _sleep(self) -> None:
        self._server.last_step = math.inf
        try:
            self._received.put(*self._inbox.get(timeout=IDLE_SECONDS))
        except queue.Empty:
            self._collect_garbage()
        else:
            self._is_clean = False
        self._server.last_step = self._clock()

    def _collect_garbage(self) -> None:
        """Collect garbage while idle: the collector is off so that it never pauses a step. Cycles are rare."""
        if not self._is_clean:
            self._collect_all()
            self._is_clean = True
