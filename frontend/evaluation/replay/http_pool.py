"""Connections to one HTTP server: one for each request in flight; idle ones are kept."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

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


_DEFAULT_PORTS = {"http": 80, "https": 443}
_CONNECT_SECONDS = 30.0


class HttpPool:
    """Connections to the server at `base_url`: `http://host:port` or `https://...`, with a path prefix of its API.

    A final `/v1` of the path is dropped, since API paths begin with it. `headers` are sent with each request. Raises
    `ValueError` for an invalid URL, or a header that cannot be sent.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or port == -1 or parts.query or parts.username:
            raise ValueError(
                f"base_url={base_url!r} is not the URL of a server; give one such as http://127.0.0.1:8000"
            )
        self.host = parts.hostname
        self.port = port or _DEFAULT_PORTS[parts.scheme]
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        given = {"Host": parts.netloc, "Accept-Encoding": "identity", "Content-Type": "application/json", **headers}
        self._head = "".join(f"{_checked(name)}: {_checked(value)}\r\n" for name, value in given.items())
        self._idle: list[HttpConnection] = []

    def encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return an encoded request."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def exchange(self, request: bytes, reader: ResponseReader) -> None:
        """Send an encoded request over a connection of its own.

        Raises `ConnectionRefusedError` when no server listens, other `OSError`s when sending fails or the answer ends
        too soon, or what the reader raises.
        """
        while (kept := self._kept()) is not None:
            try:
                await kept.exchange(request, reader)
            except ConnectionBrokenError as error:
                if not error.was_silent:
                    raise
                continue  # the server closed it while it was idle, as it may
            self._keep(kept)
            return
        connection = await self.connect()
        await connection.exchange(request, reader)
        self._keep(connection)

    async def connect(self) -> HttpConnection:
        """Return a new connection. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(HttpConnection, self.host, self.port, ssl=self._tls)
        except TimeoutError as error:
            raise OSError(f"no connection to {self.host}:{self.port} within {_CONNECT_SECONDS:g} s") from error
        return connection

    def close(self) -> None:
        """Drop the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> HttpConnection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    def _keep(self, connection: HttpConnection) -> None:
        if connection.is_open:
            self._idle.append(connection)


def _checked(text: str) -> str:
    if not text.isprintable() or not text.isascii():
        raise ValueError(f"a header has {text!r}, which cannot be sent; use printable ASCII")
    return text
