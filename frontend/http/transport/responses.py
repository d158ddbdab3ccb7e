"""Building blocks of responses: ids, JSON, static files."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.frontend.turns import in_turns

T = TypeVar("T")

REQUEST_ID = "X-Request-Id"
_PART_BYTES = 1 << 18
_GOOD_ID = r"[!-~]{1,128}"

GivenId = Annotated[str, Meta(pattern=rf"^{_GOOD_ID}(?![\s\S])")]
"""An id that a client may choose, safe in a log line. The pattern avoids `$`, which matches before a line break."""


def new_id(prefix: str, separator: str = "-", given: str | None = None) -> str:
    """Return an id such as `cmpl-8f14e45fceea167a5a36dedd4bea2543`: from the client's choice, or a unique one."""
    return f"{prefix}{separator}{given or secrets.token_hex(16)}"


def request_id_of(headers: Headers) -> str:
    """Return the client's id for a request, if a log line can hold it, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if re.fullmatch(_GOOD_ID, given) else secrets.token_hex(16)


def encoded(value: T) -> T:
    """Return a part of a large answer as JSON, which stands for the value in what is encoded later.

    So an answer is encoded part by part, with turns for others in between.
    """
    return cast("T", msgspec.Raw(msgspec.json.encode(value)))


class _PartedResponse(Response):
    """A response whose body is sent in parts, with turns for others in between."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as ASGI defines it."""
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        async for first in in_turns(range(0, len(body), _PART_BYTES)):
            rest = body[first:]
            is_last = len(rest) <= _PART_BYTES
            await send({"type": "http.response.body", "body": bytes(rest[:_PART_BYTES]), "more_body": not is_last})


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON response of structs."""
    return _PartedResponse(msgspec.json.encode(value), status, media_type="application/json")


CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_HEADERS = {
    # Nothing from other origins and nothing inline: even text that got into a page as markup could do nothing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidated each time, usually with 304
}


class StaticFile:
    """One file, read once, with its response headers."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        self.headers = {**_HEADERS, "Content-Type": CONTENT_TYPES[path.suffix], "ETag": self.etag}

    async def respond(self, request: Request) -> Response:
        """Send the file, or 304 to a browser that has this version."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers={**_HEADERS, "ETag": self.etag})
        return Response(self.content, headers=self.headers)


def static_files(folder: Path) -> dict[str, StaticFile]:
    """Return the files of a folder and its subfolders that browsers understand, by their paths in it."""
    return {
        path.relative_to(folder).as_posix(): StaticFile(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in CONTENT_TYPES and path.is_file()
    }
