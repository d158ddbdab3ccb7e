"""Files that browsers are given, read once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

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
