"""Streamed answers, as server-sent events or as lines, and the cancelling of requests whose clients disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.frontend.http.errors import CLIENT_CLOSED_REQUEST, ApiError, cut_off

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
FAREWELL_SECONDS = 1.0  # for the client to read the last event when the server ends
KEEP_ALIVE_SECONDS = 15.0  # between signs of life before the first event, so that no proxy times out

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The media type of a stream, and the sign of life (`waiting`) that its clients ignore."""

    media_type: str
    waiting: bytes


JSON_LINES = "application/x-ndjson"
SERVER_SENT_EVENTS = StreamFormat("text/event-stream", b": waiting\n\n")


def event(data: bytes, name: str | None = None) -> bytes:
    """Return one encoded event; `data` is JSON without line breaks."""
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body of the `with` when the client disconnects, and raise `ApiError` 499."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel():
            raise  # the server is ending; the client is still there
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection") from None
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends events as they arrive; when the client disconnects, the generator is closed, which aborts its requests.

    `events` yields whole events, each of which is sent at once; it pauses while the client does not read. An exception
    before its first event is raised here, so that the response can still have another status; `explain` makes an
    event of a later one. `counted` is entered for the duration of the stream. `form`: the form of the events.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        explain: Callable[[Exception], bytes],
        counted: Callable[[], AbstractContextManager[None]] = nullcontext,
        form: StreamFormat = SERVER_SENT_EVENTS,
    ) -> None:
        self._events = events
        self._explain = explain
        self._counted = counted
        self._waiting = form.waiting
        self._has_begun = False
        self.media_type = form.media_type
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as ASGI defines it."""
        del scope
        try:
            async with cancelled_on_disconnect(receive), aclosing(self._events):
                with self._counted():
                    await self._stream(send)
        except asyncio.CancelledError:
            await self._end_cut_off(send)
            raise

    async def _stream(self, send: Send) -> None:
        await self._send_first(send)
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # noqa: BLE001 - every failure is reported to the client
            await send({"type": "http.response.body", "body": self._explain(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end_cut_off(self, send: Send) -> None:
        """End a stream that the server cuts off with an error event, so that it does not look complete."""
        if not self._has_begun:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                error = self._explain(cut_off())
                await send({"type": "http.response.body", "body": error, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_first(self, send: Send) -> None:
        """Send the headers with the first event; if that takes long, send them earlier and signs of life in between."""
        first = asyncio.ensure_future(anext(self._events, b""))
        try:
            if not (await asyncio.wait({first}, timeout=KEEP_ALIVE_SECONDS))[0]:
                await self._begin(send)
                while not (await asyncio.wait({first}, timeout=KEEP_ALIVE_SECONDS))[0]:
                    await send({"type": "http.response.body", "body": self._waiting, "more_body": True})
                data = self._result_or_error(first)
            else:
                data = first.result()
                await self._begin(send)
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
            del first  # to which an error's traceback refers by this frame, for the garbage collector to find
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    def _result_or_error(self, first: asyncio.Future[bytes]) -> bytes:
        error = first.exception()
        return self._explain(error) if isinstance(error, Exception) else first.result()
