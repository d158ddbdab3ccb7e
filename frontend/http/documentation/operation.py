"""Routes that describe themselves for `/openapi.json`."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend.http.errors import ErrorResponse
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.bodies import Body

Handler = Callable[[Request], Awaitable[Response]]
E = TypeVar("E", bound=Endpoints)

_WITH_BODY = (400, 404, 408, 413, 415, 503)
_WAITING = (429, 504)
_LOOKING = (404, 503)


@dataclass(frozen=True, slots=True)
class AnswerTypes:
    """The answers of an operation: the type of a `complete` one, and what else a client can get.

    `events`: the types of the data of server-sent events, where an answer can be streamed; `ends_with_done`: whether a
    last event is `[DONE]`; `lines`: the types of lines of JSON, where it is streamed as such. `media_types`: those of
    answers that are not JSON. `errors`: status codes that do not follow from the operation; `error`: the type of the
    bodies of errors.
    """

    complete: Any = None
    events: Sequence[type[msgspec.Struct]] = ()
    ends_with_done: bool = False
    lines: Sequence[type[msgspec.Struct]] = ()
    media_types: Sequence[str] = ()
    errors: Sequence[int] = ()
    error: type[msgspec.Struct] = ErrorResponse


class Operation(Route):
    """A path, its method, and its entry in `/openapi.json`, whose text is the handler's docstring.

    `body`: the type of the body; with one the method is POST, else GET, unless `methods` says otherwise. `generates`:
    whether the request goes to the engine, so that it may wait in the queue and accepts X-Request-Timeout. `example`: a
    body that works, to which the model's name is added. `query`: names of parameters that the document describes.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        answers: AnswerTypes,
        *,
        methods: Sequence[str] = (),
        body: type[Body] | None = None,
        generates: bool = False,
        example: Mapping[str, Any] | None = None,
        query: Sequence[str] = (),
    ) -> None:
        super().__init__(path, handler, methods=list(methods) or ["GET" if body is None else "POST"])
        self.answers = answers
        self.body = body
        self.generates = generates
        self.example = example
        self.query = query

    @property
    def documented_methods(self) -> list[str]:
        """The route's methods, without the HEAD that comes with every GET."""
        return sorted((self.methods or set()) - {"HEAD"})

    @property
    def waits(self) -> bool:
        """True if a request may wait before it is answered, for at most its X-Request-Timeout."""
        return self.generates

    @property
    def statuses(self) -> list[int]:
        """The status codes of its errors, including those that every route can have."""
        found = {401, 421, 500, *self.answers.errors}
        found.update(_WITH_BODY if self.body is not None else ())
        found.update(_WAITING if self.waits else ())
        return sorted(found)


class ModelOperation(Operation):
    """An operation of the model that its requests name in the body, loaded if need be and held until they have ended.

    Without a body the name is in the query, and the model is only looked at: status 503 if it is not loaded.
    `handler`: a method of the class `kind`, of which each loaded model has an object.
    """

    def __init__(
        self,
        models: ServedModels,
        path: str,
        kind: type[E],
        handler: Callable[[E, Request], Awaitable[Response]],
        answers: AnswerTypes,
        *,
        body: type[Body] | None = None,
        generates: bool = False,
        example: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            path, of_model(models, kind, handler, body), answers, body=body, generates=generates, example=example,
            query=("model",) if body is None else (),
        )  # fmt: skip

    @property
    def waits(self) -> bool:
        """See `Operation`: its model may have to be loaded."""
        return self.generates or self.body is not None

    @property
    def statuses(self) -> list[int]:
        """See `Operation`."""
        return sorted({*super().statuses, *(_LOOKING if self.body is None else ())})


def of_model(
    models: ServedModels,
    kind: type[E],
    handler: Callable[[E, Request], Awaitable[Response]],
    body: type[Body] | None = None,
) -> Handler:
    """Return a handler that calls that of the model which a request names, see `ModelOperation`."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        service = await models.enter(request, body)
        return await handler(service.endpoints(kind), request)

    return handle
