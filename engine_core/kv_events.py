"""Publishing of KV events: what the prefix cache gains and loses in each step (protocol/kv_events.py)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
import zmq

from quire.engine_core.feature import Feature
from quire.engine_core.request import Request
from quire.engine_core.transport.waker import Waker
from quire.kernels.runner import Sequences
from quire.protocol.address import ipc_path, remove_address
from quire.protocol.kv_events import (
    CACHE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventsConfig,
)
from quire.protocol.sockets import bind_publisher, bind_replay, connect_publisher

_STOP_SECONDS = 2.0
_END = (-1).to_bytes(8, "big", signed=True)  # the number that ends a replay

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """Takes batches of events."""

    @property
    def is_full(self) -> bool:
        """True while no batch may be put."""

    def put(self, batch: KvEventBatch) -> None:
        """Publish a batch; it must not block."""

    def stop(self) -> bool:
        """End its thread; return False if that can't be ended."""

    def stats(self) -> dict[str, float]:
        """Return counters by name."""


class KvEvents(Feature):
    """Tells a publisher of the pages that the prefix cache has gained and lost since the last batch.

    While the publisher is full the cache notes them, and what comes and goes meanwhile is never told.
    """

    def __init__(
        self, sequences: Sequences, block_size: int, publisher: Publisher, clock: Callable[[], float] = time.time
    ) -> None:
        """`block_size`: tokens of a page. `clock` is that of a calendar."""
        self._tree = sequences.tree
        self._block_size = block_size
        self._publisher = publisher
        self._clock = clock

    def attach(self, requests: Iterable[Request]) -> None:
        """Begin with an empty cache, and the pages that the engine before has left."""
        del requests
        self._publisher.put(KvEventBatch(self._clock(), [AllBlocksCleared()]))
        self._tree.watch()
        self.update()

    def update(self) -> None:
        """See Feature."""
        if self._publisher.is_full:
            return
        removed, stored = self._tree.take_changes()
        if not removed and not stored:
            return
        batch = KvEventBatch(self._clock(), [])
        if removed:
            batch.events.append(BlockRemoved(removed, CACHE_MEDIUM))
        for parent, salt, keys, tokens in stored:
            extra = None if salt is None else [(salt,)] * len(keys)
            batch.events.append(
                BlockStored(keys, parent, tokens, self._block_size, medium=CACHE_MEDIUM, extra_keys=extra)
            )
        self._publisher.put(batch)

    def stats(self) -> dict[str, float]:
        """See Feature."""
        return self._publisher.stats()

    def stop(self) -> bool:
        """See Feature."""
        return self._publisher.stop()


class ZmqPublisher:
    """Sends batches to subscribers, and those that it has kept to whoever asks for them again, on a thread.

    No subscriber holds it up: one that does not read misses batches, which shows as a gap in the numbers.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        """Open the sockets. Raises AddressError."""
        self._config = config
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: deque[tuple[int, KvEventBatch]] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_put = 0
        self._is_stopping = False
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            open_publisher = bind_publisher if config.binds else connect_publisher
            self._socket = open_publisher(self._context, config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                self._replay = bind_replay(self._context, config.replay_endpoint, config.buffer_steps + 1)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, batch: KvEventBatch) -> None:
        """See Publisher. For one thread."""
        self._waiting.append((self._num_put, batch))
        self._num_put += 1
        self._waker.wake()

    @property
    def is_full(self) -> bool:
        """See Publisher."""
        return len(self._waiting) >= self._config.max_queue_size

    def stats(self) -> dict[str, float]:
        """See Publisher."""
        return {"kv_event_batches": self._num_put}

    def stop(self) -> bool:
        """See Publisher."""
        self._is_stopping = True
        self._waker.wake()
        self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.receiver, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._is_stopping:
                ready: dict[Any, int] = dict(poller.poll())
                if self._waker.receiver.fileno() in ready:
                    self._waker.lower()
                self._send_waiting()
                if self._replay in ready and self._replay is not None:
                    self._answer(self._replay)
        finally:
            self._context.destroy(linger=0)
            for address in (self._config.endpoint, self._config.replay_endpoint):
                if address is not None and ipc_path(address) is not None:
                    remove_address(address)

    def _send_waiting(self) -> None:
        while self._waiting:
            number, batch = self._waiting.popleft()
            frames = number.to_bytes(8, "big"), self._encoder.encode(batch)
            self._kept.append(frames)
            self._socket.send_multipart((self._topic, *frames))  # never blocks: a subscriber that is full misses it

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """Send the kept batches from a number on, as far as the client reads; without the end it asks again."""
        client_id, *frames = socket.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != len(_END):
            logger.warning(
                "kv_events_config: a replay is asked for by an empty frame and 8 bytes; a request is ignored"
            )
            return
        first = frames[1]
        wanted = [(self._topic, *kept) for kept in self._kept if kept[0] >= first]
        with contextlib.suppress(zmq.ZMQError):  # it does not read, or has gone
            for parts in (*wanted, (b"", _END, b"")):
                socket.send_multipart((client_id, b"", *parts), zmq.NOBLOCK)


def start_kv_events(config: KvEventsConfig, sequences: Sequences, block_size: int) -> KvEvents:
    """Open the sockets and start publishing. Raises AddressError."""
    publisher = ZmqPublisher(config)
    publisher.start()
    return KvEvents(sequences, block_size, publisher)
