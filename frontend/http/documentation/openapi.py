"""The OpenAPI 3.1 document of the server, made from its routes and the structs that they read and write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path

from quire.frontend.http.dialects.registry import DIALECTS
from quire.frontend.http.documentation.operation import AnswerTypes, Operation
from quire.frontend.http.documentation.schemas import Schema, Schemas
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.transport.auth import open_paths
from quire.frontend.http.transport.responses import static_files
from quire.frontend.http.transport.sse import JSON_LINES, SERVER_SENT_EVENTS
from quire.frontend.version import installed_version

EVENT_STREAM = SERVER_SENT_EVENTS.media_type

_DESCRIPTION = """\
This server offers {models} through {apis} APIs. Fields have the
names and meanings of these APIs and of vLLM; an unknown or unsupported field is rejected with status 400 and an error
that names it.
"""
_ERRORS = {
    400: "The request can't be served as it is; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The admin key is missing or wrong.",
    404: "There is no model with this name, or nothing at this path.",
    408: "The body did not arrive in time.",
    409: "The engine is needed: it is the last one that takes requests.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The header Host has a name by which the server may not be addressed.",
    429: "Too many requests are waiting; try again after Retry-After seconds.",
    500: "The server failed; its log has the details.",
    503: "The server accepts no requests now: it is shutting down, or its engine is dead or can't do this now.",
    504: "The request's time limit was up before its first token.",
}
_HEADERS: dict[str, Schema] = {
    "X-Request-Id": {
        "description": "The request's id in the server's log: the client's, if it sent one.",
        "required": True,
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"description": "The scheme in which keys are sent.", "schema": {"type": "string"}},
}
_HEADERS_OF = {401: ["WWW-Authenticate"], 429: ["Retry-After"]}
_PARAMETERS: dict[str, Schema] = {
    "X-Request-Id": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "An id for the request, at most 128 printable ASCII characters; any other is replaced.",
        "schema": {"type": "string"},
    },
    "X-Request-Timeout": {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds that the request may take. The answer then ends with what has been generated.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e9},
    },
    "model": {
        "name": "model",
        "in": "query",
        "description": "The name of a model of the server. Default: its first.",
        "schema": {"type": "string"},
    },
    "engine": {
        "name": "engine",
        "in": "query",
        "description": "The number of one of several engines. Default: the first that is there.",
        "schema": {"type": "integer", "minimum": 0, "maximum": 999999999},
    },
}
_SECURITY: dict[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients send it."},
    "basic": {"type": "http", "scheme": "basic", "description": "The key as the password of any user, for browsers."},
}


def document(models: ServedModels, operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these operations."""
    known = list(operations)
    schemas = Schemas(kind for operation in known for kind in _types(operation))
    for operation in known:
        if operation.body is not None:
            schemas.describe_body(operation.body, models.public_names, models.vocab_size)
    paths: dict[str, Any] = {}
    for operation in known:
        for method in operation.documented_methods:
            path = compile_path(operation.path)[1]
            paths.setdefault(path, {})[method.lower()] = _operation(operation, method, models, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": installed_version(),
            "description": _DESCRIPTION.format(models=_described(models), apis=_apis()),
        },
        "servers": [{"url": models.server.args.root_path or "/"}],
        "security": [{name: []} for name in _SECURITY] if models.server.args.all_api_keys() else [],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": _error_responses(known, schemas),
            "headers": _HEADERS,
            "parameters": _PARAMETERS,
            "securitySchemes": _SECURITY,
        },
    }


def _described(models: ServedModels) -> str:
    names = ", ".join(f"`{model.name}`" for model in models)
    return f"the model {names}" if len(models.models) == 1 else f"the models {names}"


def _apis() -> str:
    *others, last = (f"{name}'s" for name in ("OpenAI", *(dialect.name for dialect in DIALECTS)))
    return f"{', '.join(others)} and {last}"


def _types(operation: Operation) -> list[Any]:
    kinds = [
        operation.body,
        operation.answers.complete,
        operation.answers.error,
        *operation.answers.events,
        *operation.answers.lines,
    ]
    return [kind for kind in kinds if kind is not None]


def _operation(operation: Operation, method: str, models: ServedModels, schemas: Schemas) -> Schema:
    summary, description = _texts(operation)
    _, path, converters = compile_path(operation.path)
    entry: Schema = {
        "operationId": _identifier(method, path),
        "summary": summary,
        "description": description,
        "parameters": [
            *(_path_parameter(name, models.default.name) for name in converters),
            _reference("parameters", "X-Request-Id"),
            *([_reference("parameters", "X-Request-Timeout")] if operation.waits else []),
            *(_reference("parameters", name) for name in operation.query),
        ],
        "responses": {
            "200": _answer(operation, schemas),
            **{str(status): _reference("responses", _name(operation, status)) for status in operation.statuses},
        },
    }
    if operation.body is not None:
        entry["requestBody"] = {"required": True, "content": {"application/json": _body(operation, models, schemas)}}
    if path in open_paths(metrics_without_key=models.server.args.metrics_without_key):
        entry["security"] = []
    return entry


def _texts(operation: Operation) -> tuple[str, str]:
    """Return the first sentence of the handler's docstring, and the rest."""
    text = inspect.getdoc(operation.endpoint) or ""
    summary, _, description = text.partition(".")
    return " ".join(summary.split()), description.strip()


def _identifier(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _path_parameter(name: str, example: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": example}


def _body(operation: Operation, models: ServedModels, schemas: Schemas) -> Schema:
    content: Schema = {"schema": schemas.of(operation.body)}
    if operation.example is not None:
        content["example"] = {"model": models.default.name, **operation.example}
    return content


def _answer(operation: Operation, schemas: Schemas) -> Schema:
    content: Schema = {}
    if operation.answers.complete is not None:
        content["application/json"] = {"schema": schemas.of(operation.answers.complete)}
    if operation.answers.events:
        content[EVENT_STREAM] = {"schema": _event(operation, schemas)}
    if operation.answers.lines:
        content[JSON_LINES] = {"schema": _line(operation, schemas)}
    for media_type in operation.answers.media_types:
        content[media_type] = {"schema": {"type": "string"}}
    return {
        "description": "The answer.",
        "headers": {"X-Request-Id": _reference("headers", "X-Request-Id")},
        "content": content,
    }


def _event(operation: Operation, schemas: Schemas) -> Schema:
    """Return the schema of one event, which is by convention the schema of an event stream."""
    kinds = [schemas.of(kind) for kind in (*operation.answers.events, operation.answers.error)]
    data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    if operation.answers.ends_with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
        "description": "One server-sent event; its data is JSON.",
    }


def _line(operation: Operation, schemas: Schemas) -> Schema:
    """Return the schema of one line, which is by convention the schema of a stream of lines."""
    kinds = [schemas.of(kind) for kind in (*operation.answers.lines, operation.answers.error)]
    return {"anyOf": kinds, "description": "One line of JSON."}


def _error_responses(operations: Iterable[Operation], schemas: Schemas) -> Schema:
    return {
        _name(operation, status): {
            "description": _ERRORS[status],
            "headers": {name: _reference("headers", name) for name in ("X-Request-Id", *_HEADERS_OF.get(status, []))},
            "content": {"application/json": {"schema": schemas.of(operation.answers.error)}},
        }
        for operation in operations
        for status in operation.statuses
    }


def _name(operation: Operation, status: int) -> str:
    """Return the component name of an error's response, such as `NotFoundErrorResponse`: one per status and shape."""
    return HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "") + operation.answers.error.__name__


def _reference(kind: str, name: str) -> Schema:
    return {"$ref": f"#/components/{kind}/{name}"}


_FOLDER = Path(__file__).parent / "docs"


class Documentation:
    """Documents `routes`, to which its own may be added later: the document is made at the first request for it."""

    def __init__(self, models: ServedModels, routes: Sequence[Route]) -> None:
        self._models = models
        self._routes = routes
        self._files = static_files(_FOLDER)

    def routes(self) -> list[Route]:
        """Return the routes of the documentation itself."""
        return [
            Operation("/openapi.json", self.openapi, AnswerTypes(dict[str, Any])),
            Operation("/docs", self.page, AnswerTypes(media_types=["text/html"])),
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
        return msgspec.json.encode(document(self._models, operations))
