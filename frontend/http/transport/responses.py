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

T = TypeVar("T")

REQUEST_ID = "X-Request-Id"
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


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON response of structs."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


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
