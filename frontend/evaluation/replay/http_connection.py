"""Connection to an HTTP server at a low cost for the client: no coroutine wakes for a piece of an answer."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools


class ResponseReader(Protocol):
    """Reader of a response as it arrives; each call is on the path of a token."""

    def on_status(self, status: int) -> None:
        """Take the status."""

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body. An exception ends the connection, and is raised by the exchange."""


class ConnectionBrokenError(OSError):
    """The connection ended before the answer did. `was_silent`: nothing of the answer had arrived."""

    def __init__(self, message: str, was_silent: bool) -> None:
        super().__init__(message)
        self.was_silent = was_silent


class HttpConnection(asyncio.Protocol):
    """A connection for consecutive requests, each with its own reader."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reader: ResponseReader | None = None
        self._done: asyncio.Future[None] | None = None
        self._was_silent = True
        self._is_framed = False  # the answer has a length or is chunked
        self._is_kept = False
        self._ends_with_connection = False  # the end of the connection is the end of the answer
        self.is_open = False

    async def exchange(self, request: bytes, reader: ResponseReader) -> None:
        """Send a request, and let `reader` take the answer until its end.

        Raises `ConnectionBrokenError`, or what the reader raises. When cancelled, it closes the connection.
        """
        assert self._transport is not None
        if not self.is_open:
            raise ConnectionBrokenError("the server has closed the connection", was_silent=True)
        self._reader, self._was_silent, self._ends_with_connection = reader, True, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._reader = self._done = None
        if not self._is_kept:
            self.close()

    def close(self) -> None:
        """Drop the connection, even in the middle of an answer."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._done is None or self._done.done():  # no request is in flight
            self.close()
            return
        self._was_silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ or error.__cause__
            is_ours = isinstance(error, httptools.HttpParserCallbackError) and isinstance(cause, Exception)
            self._fail(cause if is_ours and cause is not None else _broken(f"its answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_open = False
        if exc is None and self._ends_with_connection:
            self._end(is_kept=False)
        self._fail(
            ConnectionBrokenError(f"the server broke the connection{f': {exc}' if exc else ''}", self._was_silent)
        )

    # Called by httptools

    def on_message_begin(self) -> None:
        """Begin an answer; informational ones (1xx) come before the final one."""
        self._is_framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        name = name.lower()
        self._is_framed |= name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())

    def on_headers_complete(self) -> None:
        """Pass on the status."""
        assert self._reader is not None
        self._ends_with_connection = not self._is_framed and self._parser.get_status_code() >= 200
        self._reader.on_status(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body, without its chunked encoding."""
        assert self._reader is not None
        self._reader.on_body(body)

    def on_message_complete(self) -> None:
        """End the exchange, unless the answer is informational."""
        if self._parser.get_status_code() >= 200:
            self._end(is_kept=self._parser.should_keep_alive())  # known only now

    def _end(self, *, is_kept: bool) -> None:
        if self._done is not None and not self._done.done():
            self._is_kept = is_kept
            self._done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def _broken(message: str) -> ConnectionBrokenError:
    return ConnectionBrokenError(message, was_silent=False)
