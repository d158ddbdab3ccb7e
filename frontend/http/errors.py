"""Errors that clients receive, in the shape of the API that they called."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import msgspec
from starlette.responses import Response

from quire.frontend.errors import EngineDeadError, RequestError, RequestTimeoutError
from quire.frontend.text.chat.tool_grammar import rejected_grammar, tool_at_fault
from quire.frontend.text.chat.tools import ToolError, ToolUse
from quire.protocol.errors import ProtocolError
from quire.protocol.messages import ErrorKind

CLIENT_CLOSED_REQUEST = 499  # nginx's code: nobody reads the response, but the access log shows it

_FIELD = re.compile(r"(?P<field>[a-z_]+(?:\[\w+\]|\.[a-z_]+)*)(?:=| (?:is|has|holds|names) )")

_UNAVAILABLE = {ErrorKind.SHUTTING_DOWN: "shutting_down", ErrorKind.UNAVAILABLE: "unavailable"}  # codes of status 503

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetails(msgspec.Struct):
    """The error: a message for people; for programs its type, the field at fault and a code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: ErrorDetails


class ApiError(Exception):
    """An error response: an HTTP status, a message for people, and for programs the field (`param`) and a `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> ErrorResponse:
        """The JSON body, which is also the data of the event that ends a failed stream."""
        return ErrorResponse(ErrorDetails(self.message, self.type, self.param, self.code))

    def response(self, body: msgspec.Struct | None = None) -> Response:
        """Return the HTTP response; `body` replaces OpenAI's shape for an API that has its own."""
        data = msgspec.json.encode(self.body if body is None else body)
        return Response(data, self.status, headers=self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of status 400: the request can't be served as it is."""
    return ApiError(400, message, param=param, code=code)


def cut_off() -> ApiError:
    """Return an error of status 503: the server is ending and does not wait for the answer."""
    return ApiError(503, "the server shut down before this request had finished; send it again", code="shutting_down")


def api_error(error: Exception, retry_after: int) -> ApiError | None:
    """Return the error response for an exception of the frontend, None if it is a defect.

    `retry_after`: the seconds to name in Retry-After when the server is overloaded.
    """
    match error:
        case ApiError():
            response: ApiError | None = error
        case RequestTimeoutError():
            response = ApiError(504, str(error), code="deadline_exceeded")
        case RequestError():
            response = _of_kind(error, retry_after)
        case EngineDeadError():
            response = ApiError(503, f"{error.summary}; send this request again", code="engine_dead")
        case ProtocolError():
            response = ApiError(413, str(error), code="request_too_large")
        case ToolError():
            response = bad_request(str(error), error.param)
        case ValueError():
            response = bad_request(str(error), field_of(str(error)))
        case _:
            response = None
    return response


def _of_kind(error: RequestError, retry_after: int) -> ApiError:
    if error.kind is ErrorKind.OVERLOADED:
        return ApiError(429, str(error), code="overloaded", headers={"Retry-After": str(retry_after)})
    if error.kind in _UNAVAILABLE:
        return ApiError(503, str(error), code=_UNAVAILABLE[error.kind], headers={"Retry-After": str(retry_after)})
    if error.kind is ErrorKind.FAILED:
        return ApiError(500, str(error), code="engine_error")
    return bad_request(str(error), field_of(str(error)), error.code)


def field_of(message: str) -> str | None:
    """Return the field that a message begins with, as messages about rejected values do: `temperature=-1 is ...`."""
    match = _FIELD.match(message)
    return None if match is None else match["field"]


@contextmanager
def errors_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Report errors about tools and parameters in the field names of the API that the client called.

    Each key of `names` is replaced, in order, by its value. Raises `ApiError` 400 in place of the error.
    """
    try:
        yield
    except ToolError as error:
        raise bad_request(_renamed(str(error), names), _renamed(error.param, names)) from None
    except ValueError as error:
        if isinstance(error, ProtocolError) or getattr(error, "kind", ErrorKind.INVALID) is not ErrorKind.INVALID:
            raise  # the request is too large, or the engine is at fault
        message = _renamed(str(error), names)
        raise bad_request(message, field_of(message), getattr(error, "code", None)) from None


@contextmanager
def errors_at(field: str, index: int | None = None) -> Iterator[None]:
    """Report a text that can't be a prompt with its place in the body: `field`, or the entry of it that is at fault.

    `index` is that of the entry unless the error has it. Raises `ApiError` 400.
    """
    try:
        yield
    except RequestError as error:
        if error.kind is not ErrorKind.INVALID:
            raise
        other, entry = field_of(error.reason), index if error.index is None else error.index
        if other is not None:
            raise bad_request(error.reason, other, error.code) from None
        place = field if entry is None else f"{field}[{entry}]"
        raise bad_request(f"{place}: {error.reason}", place, error.code) from None


@asynccontextmanager
async def grammar_errors_at(field: str, tools: ToolUse | None = None) -> AsyncIterator[None]:
    """Report a grammar that the engine rejects as an error of the tool that caused it, or else of `field`.

    Raises `ToolError` or `ApiError` 400.
    """
    try:
        yield
    except RequestError as error:
        why = rejected_grammar(error)
        if why is None:
            raise
        at_fault = await asyncio.to_thread(tool_at_fault, error, tools)
        raise at_fault or bad_request(f"{field} can't be used: {why}", field) from None


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for name, replacement in names.items():
        text = text.replace(name, replacement)
    return text
