"""Routes that describe themselves for `/openapi.json`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend.http.errors import ErrorResponse
from quire.frontend.http.transport.bodies import Body

Handler = Callable[[Request], Awaitable[Response]]

_WITH_BODY = (400, 404, 408, 413, 415, 503)
_GENERATING = (429, 504)


class Operation(Route):
    """A path, its method, and its entry in `/openapi.json`, whose text is the handler's docstring.

    `body`: the type of the body; with one the method is POST, else GET, unless `methods` says otherwise. `answer`: the
    type of a complete answer; `events`: the types of the data of server-sent events, where an answer can be streamed;
    `ends_with_done`: whether a last event is `[DONE]`; `lines`: the types of lines of JSON, where it is streamed as
    such. `media_types`: those of answers that are not JSON. `generates`: whether the request goes to the engine, so
    that it may wait in the queue and accepts X-Request-Timeout. `errors`: status codes that do not follow from these;
    `error`: the type of their bodies. `example`: a body that works, to which the model's name is added.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        methods: Sequence[str] = (),
        body: type[Body] | None = None,
        answer: Any = None,
        events: Sequence[type[msgspec.Struct]] = (),
        ends_with_done: bool = False,
        lines: Sequence[type[msgspec.Struct]] = (),
        media_types: Sequence[str] = (),
        generates: bool = False,
        errors: Sequence[int] = (),
        error: type[msgspec.Struct] = ErrorResponse,
        example: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, handler, methods=list(methods) or ["GET" if body is None else "POST"])
        self.body = body
        self.answer = answer
        self.events = tuple(events)
        self.ends_with_done = ends_with_done
        self.lines = tuple(lines)
        self.media_types = tuple(media_types)
        self.generates = generates
        self.error = error
        self.example = example
        self._errors = errors

    @property
    def documented_methods(self) -> list[str]:
        """The route's methods, without the HEAD that comes with every GET."""
        return sorted((self.methods or set()) - {"HEAD"})

    @property
    def statuses(self) -> list[int]:
        """The status codes of its errors, including those that every route can have."""
        found = {401, 421, 500, *self._errors}
        found.update(_WITH_BODY if self.body is not None else ())
        found.update(_GENERATING if self.generates else ())
        return sorted(found)
