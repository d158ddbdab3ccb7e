"""The page: a chat, and the live view of the engine."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend.http.documentation.operations import Operation
from quire.frontend.http.transport.static_file import static_files

_FOLDER = Path(__file__).parents[2] / "page"


def page_routes() -> list[Route]:
    """`GET /` and `GET /page/...` for each file of the page."""
    files = static_files(_FOLDER)
    index = files.pop("index.html")

    async def page(request: Request) -> Response:
        """Show a chat with the model and the live view of the engine. In a browser."""
        return await index.answer(request)

    return [
        Operation("/", page, media_types=["text/html"]),
        *(Route(f"/page/{name}", file.answer, include_in_schema=False) for name, file in files.items()),
    ]
