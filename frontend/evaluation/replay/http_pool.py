"""Pool of connections to one HTTP server: one for each request in flight; idle ones are kept."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from quire.frontend.evaluation.replay.http_connection import ConnectionBrokenError, HttpConnection, ResponseReader

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
