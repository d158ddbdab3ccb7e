"""The endpoints `/openapi.json` and `/docs`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend.http.documentation.openapi import document
from quire.frontend.http.documentation.operation import Operation
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.responses import static_files

_FOLDER = Path(__file__).parent / "docs"


class Documentation:
    """Documents `routes`, to which its own may be added later: the document is made at the first request for it."""

    def __init__(self, service: ModelService, routes: Sequence[Route]) -> None:
        self._service = service
        self._routes = routes
        self._files = static_files(_FOLDER)

    def routes(self) -> list[Route]:
        """Return the routes of the documentation itself."""
        return [
            Operation("/openapi.json", self.openapi, answer=dict[str, Any]),
            Operation("/docs", self.page, media_types=["text/html"]),
            *(
                Route(f"/docs/{name}", file.respond, include_in_schema=False)
                for name, file in self._files.items()
                if name != "index.html"
            ),
        ]

    async def openapi(self, _request: Request) -> Response:
        """Describe the server. This document, as OpenAPI 3.1."""
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """Show this document as a page. For browsers."""
        return await self._files["index.html"].respond(request)

    @cached_property
    def _document(self) -> bytes:
        operations = [route for route in self._routes if isinstance(route, Operation)]
        return msgspec.json.encode(document(self._service, operations))
