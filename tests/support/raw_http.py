"""HTTP by hand, for requests that no client would send."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any, Self
from urllib.parse import urlsplit

from http_server import Reply
from patience import PATIENCE


class RawConnection:
    """One connection that sends bytes unchanged and reads one response after another."""

    def __init__(self, url: str, source: str = "") -> None:
        """`source`: the address that the connection comes from."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.socket = socket.create_connection((parts.hostname, parts.port or 80), PATIENCE, (source, 0))

    @property
    def address(self) -> str:
        """The address of our end, as in the server's access log."""
        return "{}:{}".format(*self.socket.getsockname())

    def send(self, data: bytes) -> Self:
        """Send bytes."""
        self.socket.sendall(data)
        return self

    def reply(self) -> Reply:
        """Return the next response, complete."""
        response = self.begin_reply()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def begin_reply(self) -> http.client.HTTPResponse:
        """Return the next response after reading only its headers."""
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        return response

    def is_closed(self) -> bool:
        """Wait for the next byte; return whether the connection ended instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def post(path: str, body: Any, *headers: str, length: int | None = None) -> bytes:
    """Return a POST request as bytes; `body` is any value for JSON, or bytes to send unchanged."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data) if length is None else length}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data
