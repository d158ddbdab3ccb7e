"""Building blocks of responses: ids, JSON, static files."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

REQUEST_ID = "X-Request-Id"
_GOOD_ID = r"[!-~]{1,128}"

GivenId = Annotated[str, Meta(pattern=rf"^{_GOOD_ID}(?![\s\S])")]
"""A name that a client may choose: one that a line of a log can hold. `$` would let a line break end it."""


def new_id(prefix: str, separator: str = "-", given: str | None = None) -> str:
    """A name such as `cmpl-8f14e45fceea167a5a36dedd4bea2543`: of its client's choice, or one that no other has."""
    return f"{prefix}{separator}{given or secrets.token_hex(16)}"


def request_id_of(headers: Headers) -> str:
    """The client's name for a request, if it is one that a log line can hold; else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if re.fullmatch(_GOOD_ID, given) else secrets.token_hex(16)


def json_response(value: Any, status: int = 200) -> Response:
    """A struct, or what is made of them, as the body."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, and nothing inline: a text that found its way into a page as markup could do nothing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for each time, and answered with 304
}


class StaticFile:
    """One file, with the headers it is sent with."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        self.headers = {**_HEADERS, "Content-Type": CONTENT_TYPES[path.suffix], "ETag": self.etag}

    async def answer(self, request: Request) -> Response:
        """The file, or 304 for a browser that has this version of it."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers={**_HEADERS, "ETag": self.etag})
        return Response(self.content, headers=self.headers)


def static_files(folder: Path) -> dict[str, StaticFile]:
    """The files of a folder that a browser understands, by name."""
    return {path.name: StaticFile(path) for path in sorted(folder.iterdir()) if path.suffix in CONTENT_TYPES}
