"""The streams of an event loop: increments arrive on the client's thread, consumers wake up on the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from quire.frontend.client.engine_client import Delivery, EngineAway, EngineBack, EngineLeft, EngineRefusal
from quire.frontend.client.observer import OpenRequest
from quire.frontend.client.request_table import RequestTable, part_of
from quire.frontend.errors import EngineDeadError, RequestError
from quire.frontend.turns import SLICE_SECONDS
from quire.protocol.messages import EngineCoreOutputs

_PART_OUTPUTS = 16


def apply_delivery(table: RequestTable, delivery: Delivery) -> list[OpenRequest]:
    """Pass a delivery on to the table, and send again what is to be; return the requests that have grown or ended."""
    grown = _take_in(table, delivery)
    while table.is_resending:
        grown += table.resend()
    return grown


def _take_in(table: RequestTable, delivery: Delivery) -> list[OpenRequest]:
    """Pass a delivery on to the table, which may have something to send then; return the requests that have changed."""
    grown: list[OpenRequest] = []
    match delivery:
        case EngineCoreOutputs():
            grown = table.update(delivery)
        case EngineAway():
            grown = table.suspend(delivery.reason, delivery.engine, is_loss=delivery.is_loss)
        case EngineBack():
            table.resume(delivery.session, delivery.block_size, delivery.address)
        case EngineLeft():
            grown = table.leave(delivery.reason, delivery.engine)
        case EngineRefusal():
            grown = table.fail(delivery.error, delivery.engine)
        case EngineDeadError():
            grown = table.end(delivery)
    return grown


def parts_of(delivery: Delivery) -> list[Delivery]:
    """Return deliveries of the same effect that take a fraction of a millisecond each, if they are outputs."""
    if not isinstance(delivery, EngineCoreOutputs):
        return [delivery]
    outputs = delivery.outputs
    return [
        EngineCoreOutputs(outputs[first : first + _PART_OUTPUTS], None, delivery.timestamp)
        for first in range(0, len(outputs), _PART_OUTPUTS)
    ]


class WaitingNotices:
    """The engines whose latest news, which has not been taken yet, is that they are away. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: set[int] = set()

    def repeat(self, delivery: Delivery) -> bool:
        """Note a delivery; return True if it says what waits already."""
        with self._lock:
            if isinstance(delivery, EngineAway):
                is_repeated = delivery.engine in self._engines
                self._engines.add(delivery.engine)
                return is_repeated
            if isinstance(delivery, EngineBack):
                self._engines.discard(delivery.session.engine)
        return False

    def take(self, delivery: Delivery) -> None:
        """Note that a delivery does not wait any more."""
        if isinstance(delivery, EngineAway):
            with self._lock:
                self._engines.discard(delivery.engine)


class DeliveryInbox:
    """Queue of deliveries from the clients' threads to any thread that waits for them."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._notices = WaitingNotices()

    def put(self, delivery: Delivery) -> None:
        """Add a delivery. Any thread."""
        if not self._notices.repeat(delivery):
            self._waiting.put(delivery)

    def get(self) -> Delivery:
        """Remove and return the next delivery, once there is one."""
        delivery = self._waiting.get()
        self._notices.take(delivery)
        return delivery

    def empty(self) -> bool:
        """Return True if none waits."""
        return self._waiting.empty()


class DeliveryQueue:
    """Queue of deliveries from the clients' threads to an event loop; a burst costs one wake-up."""

    def __init__(self) -> None:
        self._waiting: deque[Delivery] = deque()
        self._notices = WaitingNotices()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_deliveries: Callable[[], None] = lambda: None
        self._is_waking = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that takes the deliveries."""
        return self._loop

    def bind(self, loop: asyncio.AbstractEventLoop, on_deliveries: Callable[[], None]) -> None:
        """Call `on_deliveries` on `loop` whenever something has arrived, from now on."""
        self._loop, self._on_deliveries, self._is_waking = loop, on_deliveries, False

    def put(self, delivery: Delivery) -> None:
        """Add a delivery. Any thread."""
        if self._notices.repeat(delivery):
            return
        self._waiting.append(delivery)
        if self._is_waking or self._loop is None:
            return
        self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._on_deliveries)
        except RuntimeError:  # the loop is closed, and so are its streams
            self._is_waking = False

    def take(self) -> list[Delivery]:
        """Remove and return all deliveries."""
        self._is_waking = False  # first, so that deliveries from now on wake the loop again
        taken: list[Delivery] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
            self._notices.take(taken[-1])
        return taken


class RequestStream:
    """A request, and the consumer that waits for its increments."""

    __slots__ = ("_has_grown", "_waiter", "request")

    def __init__(self, request: OpenRequest) -> None:
        self.request = request
        self._has_grown = False
        self._waiter: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Wake the consumer: the request has grown or failed."""
        self._has_grown = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def growth(self) -> None:
        """Wait until the request has grown or failed since the last call."""
        if not self._has_grown:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_grown = False


class RequestStreams:
    """The open streams of an event loop, on which everything but `DeliveryQueue.put` happens."""

    def __init__(self, deliveries: DeliveryQueue, table: RequestTable) -> None:
        self._deliveries = deliveries
        self._table = table
        self._streams: dict[str, RequestStream] = {}
        self._parts: deque[Delivery] = deque()  # of deliveries, to be applied
        self._is_applying = False

    def open(self, request: OpenRequest) -> RequestStream:
        """Submit `request`, of which `sending` sends the rest.

        Raises `RequestError` if its id is in use, `EngineDeadError`.
        """
        self._bind()
        if request.request_id in self._streams:
            raise RequestError(f"request_id={request.request_id!r} is in use by a request that has not ended")
        stream = self._streams[request.request_id] = RequestStream(request)
        try:
            self._table.submit(request, part_of(request))
        except BaseException:
            del self._streams[request.request_id]
            raise
        return stream

    def sending(self, stream: RequestStream) -> Iterator[None]:
        """Send what `open` has left, a part at each step. Raises `EngineDeadError`."""
        while self._table.send_more(stream.request, part_of(stream.request)):
            yield

    def close(self, stream: RequestStream) -> None:
        """Remove the stream, and abort its request if it has not ended."""
        self._streams.pop(stream.request.request_id, None)
        self._table.drop([stream.request])

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends with finish reason "abort". Unknown ids are ignored: they have ended."""
        stream = self._streams.get(request_id)
        if stream is not None and self._table.abort(stream.request):
            stream.notify()

    def _bind(self) -> None:
        loop, bound = asyncio.get_running_loop(), self._deliveries.loop
        if loop is bound:
            return
        if self._streams and bound is not None and not bound.is_closed():
            raise RuntimeError(
                f"an AsyncLLM works on one event loop at a time, and {len(self._streams)} of its streams are open "
                "on another; end them first, or use an AsyncLLM for each loop (they can share an engine)"
            )
        self._table.drop([stream.request for stream in self._streams.values()])
        self._streams.clear()
        self._deliveries.bind(loop, self._on_deliveries)
        self._is_applying = False
        self._on_deliveries()

    def _on_deliveries(self) -> None:
        for delivery in self._deliveries.take():
            self._parts += parts_of(delivery)
        if not self._is_applying:
            self._apply()

    def _apply(self) -> None:
        """Apply what has arrived, and send again what is to be, in slices."""
        end = time.monotonic() + SLICE_SECONDS
        try:
            while (self._parts or self._table.is_resending) and time.monotonic() < end:
                changed = _take_in(self._table, self._parts.popleft()) if self._parts else []
                for request in changed + self._table.resend():
                    self._streams[request.request_id].notify()
        finally:
            self._is_applying = bool(self._parts) or self._table.is_resending
            if self._is_applying:
                asyncio.get_running_loop().call_soon(self._apply)
