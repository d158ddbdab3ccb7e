"""Publishing of KV events: what the prefix cache gains and loses in each step (protocol/kv_events.py)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import msgspec
import zmq

from quire.engine_core.feature import Feature
from quire.engine_core.request import Request
from quire.engine_core.transport.waker import Waker
from quire.engine_core.validation import adapter_path
from quire.kernels.runner import PrefixWatch, Sequences
from quire.protocol.address import ipc_path
from quire.protocol.errors import AddressError
from quire.protocol.kv_events import (
    CACHE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventsConfig,
)
from quire.protocol.sockets import bind_replay, open_publisher

_STOP_SECONDS = 2.0
_END = (-1).to_bytes(8, "big", signed=True)  # the number that ends a replay
_MOST_WAITING = 256  # batches, mostly of the tokens of a step each
_MOST_PAGES = 2048  # of a batch
_MOST_SALTS = 4096  # of adapters with names
_MOST_KEPT_BYTES = 64 << 20
_MOST_REPLAYS = 16  # at a time
_BATCHES_AT_ONCE = 64  # of a replay, between those that are new
_TURN_MILLISECONDS = 5
_PATIENCE_SECONDS = 30.0  # for a client that does not read its replay

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


class _AdapterNames:
    """The names of the adapters whose requests have the salts of prefixes, by the keys of the empty prefixes."""

    def __init__(self, watch: PrefixWatch, adapters: Mapping[str, str]) -> None:
        """`watch`: of all salts. `adapters`: paths by name; of several names of a path the first is told."""
        self._watch = watch
        self._by_path = {adapter_path(path): name for name, path in reversed([*adapters.items()])}
        self._by_root: dict[int, str] = {}
        self._salts: dict[str, int] = {}  # with the same keys, the one that was used least recently first

    def add(self, request: Request) -> None:
        """Know the salt of a request that has got its adapter."""
        name = self._by_path.get(adapter_path(request.message.adapter))
        if name is not None and request.cache_salt is not None:
            self._add(request.cache_salt, name)

    def find(self, root: int) -> str | None:
        """Return the name for the key of an empty prefix; None if it is of no adapter that has a name."""
        return self._by_root.get(root)

    def _add(self, salt: str, name: str) -> None:
        root = self._salts.pop(salt, None)
        if root is None:
            [root] = self._watch.add_salts([salt])
            self._by_root[root] = name
        self._salts[salt] = root
        if len(self._salts) > _MOST_SALTS:
            oldest = next(iter(self._salts))
            self._by_root.pop(self._salts.pop(oldest), None)


class KvEvents(Feature):
    """Tells a publisher of the pages that the prefix cache has gained and lost since the last batch.

    Many pages are told in several steps. While the publisher is full the cache notes them, and what comes and goes
    meanwhile is never told.
    """

    def __init__(
        self,
        sequences: Sequences,
        block_size: int,
        publisher: Publisher,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`block_size`: tokens of a page. `wake` has the engine step again. `clock` is that of a calendar. `adapters`:
        paths by name, of the adapters to name in events."""
        self._watch = sequences.tree.watch()
        self._names = _AdapterNames(self._watch, adapters or {})
        self._block_size = block_size
        self._publisher = publisher
        self._wake = wake
        self._clock = clock

    def attach(self, requests: Iterable[Request]) -> None:
        """Begin with an empty cache, and the pages that the engine before has left."""
        del requests
        self._publisher.put(KvEventBatch(self._clock(), [AllBlocksCleared()]))
        self.update()

    def note_adapter(self, request: Request) -> None:
        """Learn whose pages are those of a request that has got its adapter."""
        self._names.add(request)

    def update(self) -> None:
        """See Feature."""
        if self._publisher.is_full or not self._watch.has_changes:
            return
        removed, stored = self._watch.take(_MOST_PAGES)
        batch = KvEventBatch(self._clock(), [])
        if removed:
            batch.events.append(BlockRemoved(removed, CACHE_MEDIUM))
        for parent, root, is_salted, keys, tokens in stored:
            extra = [(f"{root:016x}",)] * len(keys) if is_salted else None
            name = self._names.find(root)
            batch.events.append(BlockStored(keys, parent, tokens, self._block_size, None, CACHE_MEDIUM, name, extra))
        self._publisher.put(batch)
        if self._watch.has_changes:
            self._wake()

    def stats(self) -> dict[str, float]:
        """See Feature."""
        return self._publisher.stats()

    def stop(self) -> bool:
        """See Feature."""
        return self._publisher.stop()


@dataclass
class _Replay:
    """A replay that is being sent to a client."""

    next: int  # number of the next batch
    last_progress: float


class ZmqPublisher:
    """Sends batches to subscribers, and those that it has kept to whoever asks for them again, on a thread.

    No subscriber holds it up: one that does not read misses batches, which shows as a gap in the numbers. These are
    greater than those of all engines before, so that a new one shows as a gap too.
    """

    def __init__(self, config: KvEventsConfig, wake: Callable[[], None]) -> None:
        """Open the sockets. `wake` is called when it is no longer full. Raises AddressError."""
        self._config = config
        self._wake = wake
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: deque[tuple[int, KvEventBatch]] = deque()
        self._first = time.time_ns() // 1000
        self._num_put = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._replays: dict[bytes, _Replay] = {}
        self._is_stopping = False
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._replay_socket: zmq.Socket[bytes] | None = None
        try:
            self._socket = open_publisher(self._context, config.endpoint, config.hwm, binds=config.binds)
            if config.replay_endpoint is not None:
                self._replay_socket = bind_replay(self._context, config.replay_endpoint, _BATCHES_AT_ONCE)
        except AddressError as error:
            self._context.destroy(linger=0)
            raise AddressError(f"kv_events_config: {error}") from error
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, batch: KvEventBatch) -> None:
        """See Publisher. For one thread."""
        self._waiting.append((self._first + self._num_put, batch))
        self._num_put += 1
        self._waker.wake()

    @property
    def is_full(self) -> bool:
        """See Publisher."""
        return len(self._waiting) >= min(self._config.max_queue_size, _MOST_WAITING)

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
        if self._replay_socket is not None:
            poller.register(self._replay_socket, zmq.POLLIN)
        while not self._is_stopping:
            ready: dict[Any, int] = dict(poller.poll(_TURN_MILLISECONDS if self._replays else None))
            if self._waker.receiver.fileno() in ready:
                self._waker.lower()
            try:
                self._send_waiting()
                if self._replay_socket is not None:
                    if self._replay_socket in ready:
                        self._begin_replay(self._replay_socket)
                    for client_id in list(self._replays):
                        self._go_on(self._replay_socket, client_id)
            except Exception:  # events end with the engine only
                logger.exception("KV events could not be published")
        # Paths first, while no other engine can claim them.
        for address in (self._config.endpoint, self._config.replay_endpoint):
            if address is not None and (path := ipc_path(address)) is not None:
                path.unlink(missing_ok=True)
        self._context.destroy(linger=0)
        self._waker.close()

    def _send_waiting(self) -> None:
        was_full = False
        while self._waiting:
            was_full = was_full or self.is_full
            number, batch = self._waiting.popleft()
            payload = self._encoder.encode(batch)
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._config.buffer_steps or self._kept_bytes > _MOST_KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
            self._socket.send_multipart((self._topic, _number(number), payload))  # never blocks
        if was_full:
            self._wake()

    def _begin_replay(self, socket: zmq.Socket[bytes]) -> None:
        client_id, *frames = socket.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != len(_END):
            logger.warning("kv_events_config: a replay is asked for by an empty frame and 8 bytes; ignored a request")
        elif client_id in self._replays or len(self._replays) < _MOST_REPLAYS:
            self._replays[client_id] = _Replay(int.from_bytes(frames[1], "big"), time.monotonic())

    def _go_on(self, socket: zmq.Socket[bytes], client_id: bytes) -> None:
        """Send the next batches of a replay, as far as the client reads, and its end after the last."""
        replay, now = self._replays[client_id], time.monotonic()
        first = self._kept[0][0] if self._kept else replay.next
        start = min(max(0, replay.next - first), len(self._kept))
        batches = list(islice(self._kept, start, start + _BATCHES_AT_ONCE))
        try:
            for number, payload in batches:
                socket.send_multipart((client_id, b"", self._topic, _number(number), payload), zmq.NOBLOCK)
                replay.next, replay.last_progress = number + 1, now
            if start + len(batches) == len(self._kept):
                socket.send_multipart((client_id, b"", b"", _END, b""), zmq.NOBLOCK)
                del self._replays[client_id]
        except zmq.Again:
            if now > replay.last_progress + _PATIENCE_SECONDS:
                del self._replays[client_id]
        except zmq.ZMQError:  # the client has gone
            del self._replays[client_id]


def _number(number: int) -> bytes:
    return number.to_bytes(len(_END), "big")


def start_kv_events(
    config: KvEventsConfig,
    sequences: Sequences,
    block_size: int,
    wake: Callable[[], None],
    adapters: Mapping[str, str] | None = None,
) -> KvEvents:
    """Open the sockets and start publishing. `wake` has the engine step again, from any thread; `adapters` as in
    KvEvents. Raises AddressError."""
    publisher = ZmqPublisher(config, wake)
    publisher.start()
    return KvEvents(sequences, block_size, publisher, wake, adapters=adapters)
