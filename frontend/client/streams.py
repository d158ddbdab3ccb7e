"""The open streams of an event loop: increments come in on the client's thread, consumers wake on the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quire.frontend.client.engine_client import Delivery
from quire.frontend.client.request_table import OpenRequest, RequestTable
from quire.frontend.errors import EngineDeadError, RequestError


class Mailbox:
    """Carries deliveries from the client's thread to an event loop; many that come at once cost one wake-up."""

    def __init__(self) -> None:
        self._letters: deque[Delivery] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_letters: Callable[[], None] = lambda: None
        self._is_ringing = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop on which deliveries are taken."""
        return self._loop

    def bind(self, loop: asyncio.AbstractEventLoop, on_letters: Callable[[], None]) -> None:
        """From now on `on_letters` is called on `loop` when something has come."""
        self._loop, self._on_letters, self._is_ringing = loop, on_letters, False

    def put(self, delivery: Delivery) -> None:
        """Leave a delivery. Any thread."""
        self._letters.append(delivery)
        if self._is_ringing or self._loop is None:
            return
        self._is_ringing = True
        try:
            self._loop.call_soon_threadsafe(self._on_letters)
        except RuntimeError:  # the loop is closed, and its streams with it
            self._is_ringing = False

    def take(self) -> list[Delivery]:
        """All that has come since the last call."""
        self._is_ringing = False  # first: what comes from here on rings again
        letters: list[Delivery] = []
        while self._letters:
            letters.append(self._letters.popleft())
        return letters


class Stream:
    """One request and the consumer that waits for it to grow."""

    __slots__ = ("_has_grown", "_waiter", "request")

    def __init__(self, request: OpenRequest) -> None:
        self.request = request
        self._has_grown = False
        self._waiter: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """The request has grown or failed: wake the consumer."""
        self._has_grown = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def growth(self) -> None:
        """Wait until the request has grown since the last call."""
        if not self._has_grown:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_grown = False


class Streams:
    """All open streams. Everything but `Mailbox.put` happens on one event loop."""

    def __init__(self, mailbox: Mailbox, table: RequestTable) -> None:
        self._mailbox = mailbox
        self._table = table
        self._streams: dict[str, Stream] = {}

    def open(self, request: OpenRequest) -> Stream:
        """Submit `request`. Raises `RequestError` when its id is in use, `EngineDeadError`."""
        self._bind()
        if request.request_id in self._streams:
            raise RequestError(f"request_id={request.request_id!r} is in use by a request that has not ended")
        stream = self._streams[request.request_id] = Stream(request)
        try:
            self._table.submit(request)
        except BaseException:
            del self._streams[request.request_id]
            raise
        return stream

    def close(self, stream: Stream) -> None:
        """The consumer is gone: forget the stream, and abort what is left of its request."""
        self._streams.pop(stream.request.request_id, None)
        self._table.drop([stream.request])

    def abort(self, request_id: str) -> None:
        """Ask the engine to end this request; its stream ends with finish reason "abort". Unknown ids have ended."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._table.abort(stream.request)

    def _bind(self) -> None:
        loop, bound = asyncio.get_running_loop(), self._mailbox.loop
        if loop is bound:
            return
        if self._streams and bound is not None and not bound.is_closed():
            raise RuntimeError(
                f"an AsyncLLM works on one event loop at a time, and {len(self._streams)} of its streams are open "
                "on another; end them first, or use an AsyncLLM for each loop (they can share an engine)"
            )
        self._table.drop([stream.request for stream in self._streams.values()])
        self._streams.clear()
        self._mailbox.bind(loop, self._on_letters)
        self._on_letters()

    def _on_letters(self) -> None:
        for delivery in self._mailbox.take():
            if isinstance(delivery, EngineDeadError):
                grown = self._table.fail(delivery)
            else:
                grown = self._table.update(delivery)
            for request in grown:
                self._streams[request.request_id].notify()
