"""The peer tier: pages from the memory of another engine, whose client this one is.

A thread asks for the pages of a fetch, fills them as they arrive, and says how far it is, so that the other engine
sends more. It finds the peer again whenever that comes back; meanwhile there are no pages.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.engine_core.kv_tiers.fetch_times import FetchTimes
from quire.engine_core.kv_tiers.tier import Fetch, Key
from quire.engine_core.transport.waker import Waker
from quire.protocol.codec import ClientDecoder, encode
from quire.protocol.keys import Security
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    EngineGoodbye,
    EngineMessage,
    ErrorMessage,
    Goodbye,
    Hello,
    KvAck,
    KvCancel,
    KvFetch,
    KvFetched,
    KvHello,
    KvPage,
    KvWelcome,
    Ping,
    Pong,
    Ready,
)
from quire.protocol.sockets import connect_client

_RETRY_SECONDS = 0.5  # between attempts to reach a peer that is gone
_FIRST_HEARTBEAT = 2.0  # until the peer says what it is
_SILENT_HEARTBEATS = 4  # after which a peer is taken for dead
_LONGEST_STEP = 30.0  # seconds after which a peer that does not step is taken for hung
_STOP_SECONDS = 2.0
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

logger = logging.getLogger(__name__)


class PageFiller(Protocol):
    """Fills pages of KV memory: see `Runner`."""

    def fill_page(self, page: int, copy: npt.NDArray[np.uint8]) -> int:
        """Fill a page that nobody else uses; return its checksum."""

    def kv_format(self) -> str:
        """Return a hash of all that the bits of KV depend on besides tokens. It may take seconds."""


class _LostError(Exception):
    """The connection to the peer is lost. The message says why."""


class KvPeer:
    """The pages of the engine at `address`.

    A peer that can't be used, now or later, is logged once and counted; there are no pages then.
    """

    def __init__(self, address: str, security: Security, filler: PageFiller, block_size: int) -> None:
        """Raise AddressError or KeyFileError for an address or keys that cannot be used."""
        self._address = address
        self._security = security
        self._filler = filler
        self._block_size = block_size
        self._context: zmq.Context[zmq.Socket[Any]] = zmq.Context()
        connect_client(self._context, address, security).close(linger=0)  # raises
        self._inbox: queue.SimpleQueue[tuple[Fetch, bool]] = queue.SimpleQueue()  # with True to be cancelled
        self._waker = Waker()
        self._open: dict[int, _OpenFetch] = {}  # by id
        self._ids = itertools.count()
        self._format: str | None = None
        self._is_ready = self._is_hung = False
        self._last_complaint = ""
        self._times = FetchTimes(time.monotonic)
        self._num_fetched = self._num_failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-kv-peer", daemon=True)

    def start(self) -> None:
        """Start the thread, which connects."""
        self._thread.start()

    def stop(self) -> bool:
        """Leave the peer and end the thread; return False if it can't be ended."""
        self._stopping.set()
        self._waker.wake()
        self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()

    # On the step loop

    def find(self, keys: Sequence[Key]) -> int:
        """Return how many pages to ask for: the peer may have all or none."""
        return len(keys) if self._is_ready and not self._is_hung else 0

    def touch(self, _keys: Sequence[Key]) -> None:
        """Leave it to the peer how long it keeps what."""

    def seconds(self, num_pages: int) -> float:
        """Return the likely time of a fetch; 0 if nothing is known."""
        return self._times.seconds(num_pages)

    def fetch(self, fetch: Fetch) -> None:
        """Ask for pages."""
        self._inbox.put((fetch, False))
        self._waker.wake()

    def cancel(self, fetch: Fetch) -> None:
        """Let a fetch end with what has come."""
        self._inbox.put((fetch, True))
        self._waker.wake()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        return {
            "kv_peer_connected": int(self._is_ready),
            "kv_peer_pages_fetched": self._num_fetched,
            "kv_peer_failures": self._num_failures,
        }

    # On the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with _Session(self._context, self._address, self._security, self._waker) as session:
                    self._use(session)
            except Exception as error:  # noqa: BLE001 - whatever it is, no fetch may stay open
                self._lose(str(error) or repr(error))
            self._stopping.wait(_RETRY_SECONDS)
        self._lose("")
        self._context.destroy(linger=0)
        self._waker.close()

    def _use(self, session: _Session) -> None:
        """Exchange messages with the peer until the tier is stopped. Raises _LostError."""
        session.send(Hello(PROTOCOL_VERSION, f"engine {os.getpid()}"))
        while not self._stopping.is_set():
            for message in session.exchange():
                self._take(session, message)
            while not self._inbox.empty():
                self._change(session, *self._inbox.get_nowait())
        session.send(Goodbye())

    def _lose(self, reason: str) -> None:
        """End all fetches, since the peer is gone."""
        complaint = f"{reason}; prompts are computed here until it comes back"
        if reason and (self._is_ready or complaint != self._last_complaint):
            self._fail(complaint)
        self._is_ready = self._is_hung = False
        while not self._inbox.empty():
            fetch, is_cancelled = self._inbox.get_nowait()
            if not is_cancelled:
                fetch.done(fetch)
        for fetch_id in list(self._open):
            self._end(fetch_id)

    def _fail(self, reason: str) -> None:
        """Count a failure, and log it unless it is that which was logged last."""
        self._num_failures += 1
        if reason != self._last_complaint:
            logger.warning("KV peer %s: %s", self._address, reason)
            self._last_complaint = reason

    def _take(self, session: _Session, message: EngineMessage) -> None:
        match message:
            case Ready():
                session.heartbeat = message.heartbeat_seconds
                self._format = self._format or self._filler.kv_format()
                session.send(KvHello())
            case KvWelcome():
                self._welcome(message.format)
            case KvPage():
                self._fill(session, message)
            case KvFetched():
                if message.error is not None:
                    self._fail(message.error)
                elif (opened := self._open.get(message.fetch_id)) is not None:
                    opened.fetch.is_whole = len(opened.fetch.contents) == message.count
                self._end(message.fetch_id)
            case Pong():
                self._note_age(session, message.last_step_age)
            case ErrorMessage() if message.fatal:
                raise _LostError(message.message)
            case ErrorMessage():
                self._fail(message.message)
            case EngineGoodbye():
                raise _LostError(f"it has ended: {message.reason}")

    def _welcome(self, kv_format: str) -> None:
        if kv_format != self._format:
            self._fail(
                "its KV is of another model, number format, context length or version, and of no use here; start both "
                "engines with the same"
            )
            return
        logger.info("KV peer %s: connected", self._address)
        self._last_complaint = ""
        self._is_ready = True

    def _note_age(self, session: _Session, last_step_age: float) -> None:
        """Give all fetches up if the peer's last step was so long ago that it may never end."""
        self._is_hung = last_step_age > _LONGEST_STEP
        if self._is_hung and self._open:
            self._fail(f"it has not stepped for more than {_LONGEST_STEP:g} s")
            for fetch_id in list(self._open):
                self._give_up(session, fetch_id)

    def _change(self, session: _Session, fetch: Fetch, is_cancelled: bool) -> None:
        """Begin a fetch, or cancel it if it is still open."""
        if is_cancelled:
            for fetch_id in [each for each, opened in self._open.items() if opened.fetch is fetch]:
                self._give_up(session, fetch_id)
            return
        if not self._is_ready:
            fetch.done(fetch)
            return
        fetch_id, count = next(self._ids), len(fetch.keys) - fetch.num_states
        self._open[fetch_id] = _OpenFetch(fetch)
        first = (len(fetch.tokens) - 1) // self._block_size - count
        session.send(KvFetch(fetch_id, list(fetch.tokens), fetch.cache_salt, first, count, fetch.is_expected))

    def _fill(self, session: _Session, message: KvPage) -> None:
        opened = self._open.get(message.fetch_id)
        if opened is None:  # it was cancelled
            return
        fetch = opened.fetch
        data = np.frombuffer(message.data, np.uint8)
        try:
            is_intact = self._filler.fill_page(fetch.pages[len(fetch.contents)], data) == message.checksum
        except ValueError as error:
            raise _LostError(f"it sent a page that is none: {error}") from None
        if not is_intact:
            self._fail("a page has arrived damaged")
            self._give_up(session, message.fetch_id)
            return
        fetch.contents.append(message.checksum)
        self._num_fetched += 1
        if len(fetch.contents) == len(fetch.keys):
            self._end(message.fetch_id)
        else:
            session.send(KvAck(message.fetch_id, len(fetch.contents)))

    def _give_up(self, session: _Session, fetch_id: int) -> None:
        session.send(KvCancel(fetch_id))
        self._end(fetch_id)

    def _end(self, fetch_id: int) -> None:
        opened = self._open.pop(fetch_id, None)
        if opened is None:
            return
        if not opened.fetch.is_expected:
            self._times.learn(time.monotonic() - opened.begun, len(opened.fetch.contents))
        opened.fetch.done(opened.fetch)


class _OpenFetch:
    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.begun = time.monotonic()


class _Session:
    """A connection to the peer, until it is lost."""

    def __init__(self, context: zmq.Context[zmq.Socket[Any]], address: str, security: Security, waker: Waker) -> None:
        self.heartbeat = _FIRST_HEARTBEAT
        self._decoder = ClientDecoder()
        self._waker = waker
        self._socket = connect_client(context, address, security)
        self._monitor: zmq.Socket[Any] = self._socket.get_monitor_socket(_LOST)
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, waker.receiver):
            self._poller.register(readable, zmq.POLLIN)
        self._heard = self._beaten = time.monotonic()

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def send(self, message: ClientMessage) -> None:
        """Send a message. Raises _LostError if the peer reads none."""
        try:
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise _LostError("it reads no messages") from None

    def exchange(self) -> list[EngineMessage]:
        """Return the next messages, after a heartbeat at most. Raises _LostError, or ProtocolError."""
        now = time.monotonic()
        if now - self._beaten >= self.heartbeat:
            if now - self._beaten > 2 * self.heartbeat:  # this process was stopped itself
                self._heard = now
            self._beaten = now
            self.send(Ping())
        if now - self._heard > _SILENT_HEARTBEATS * self.heartbeat:
            raise _LostError("it does not answer")
        ready = dict(self._poller.poll(math.ceil(1000 * self.heartbeat)))
        if self._waker.receiver.fileno() in ready:
            self._waker.lower()
        if self._monitor in ready and (event := recv_monitor_message(self._monitor)["event"]) & _LOST:
            raise _LostError("it rejected the CURVE keys" if event & _REFUSED else "it is gone")
        messages: list[EngineMessage] = []
        if self._socket in ready:
            self._heard = time.monotonic()
            while self._socket.poll(0) and len(messages) < 16:
                frames = self._socket.recv_multipart(copy=False)
                messages.append(self._decoder.decode([frame.buffer for frame in frames]))
        return messages
