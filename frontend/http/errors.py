"""Errors that clients receive, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import msgspec
from starlette.responses import Response

from quire.frontend.errors import EngineDeadError, RequestError, RequestTimeoutError
from quire.frontend.text.chat.refusal import refused_grammar, tool_at_fault
from quire.frontend.text.chat.tools import ToolError, ToolUse
from quire.protocol.errors import ProtocolError
from quire.protocol.messages import ErrorKind

CLIENT_CLOSED_REQUEST = 499  # nginx's: nobody reads the answer, but the access log tells

_FIELD = re.compile(r"(?P<field>[a-z_]+(?:\[\w+\]|\.[a-z_]+)*)(?:=| (?:is|has|holds|names) )")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorDetails(msgspec.Struct):
    """What is wrong, in words; for programs: the kind of error, the field it is about, and a code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """An error as OpenAI has it."""

    error: ErrorDetails


class ApiError(Exception):
    """A refusal: HTTP status, words for a person, and for programs the field (`param`) and a `code`."""

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
        """OpenAI's word for the kind of error."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> ErrorAnswer:
        """What is sent, as JSON or as an event of a stream that has begun."""
        return ErrorAnswer(ErrorDetails(self.message, self.type, self.param, self.code))

    def response(self, body: msgspec.Struct | None = None) -> Response:
        """The whole answer; `body` is that of an API with a shape of its own."""
        data = msgspec.json.encode(self.body if body is None else body)
        return Response(data, self.status, headers=self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: the request can't be served as it is."""
    return ApiError(400, message, param=param, code=code)


def cut_off() -> ApiError:
    """Status 503: the server ends, and does not wait for the answer."""
    return ApiError(
        503, "the server has shut down before this request came to its end; send it again", code="shutting_down"
    )


def api_error(error: Exception, retry_after: int) -> ApiError | None:
    """The refusal that an exception of the frontend's amounts to, None for a defect.

    `retry_after`: seconds after which a request that came too many is worth another try.
    """
    match error:
        case ApiError():
            refusal: ApiError | None = error
        case RequestTimeoutError():
            refusal = ApiError(504, str(error), code="deadline_exceeded")
        case RequestError():
            refusal = _of_kind(error, retry_after)
        case EngineDeadError():
            refusal = ApiError(503, str(error), code="engine_dead")
        case ProtocolError():
            refusal = ApiError(413, str(error), code="request_too_large")
        case ToolError():
            refusal = bad_request(str(error), error.param)
        case ValueError():
            refusal = bad_request(str(error), field_of(str(error)))
        case _:
            refusal = None
    return refusal


def _of_kind(error: RequestError, retry_after: int) -> ApiError:
    if error.kind is ErrorKind.OVERLOADED:
        return ApiError(429, str(error), code="overloaded", headers={"Retry-After": str(retry_after)})
    if error.kind is ErrorKind.SHUTTING_DOWN:
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": str(retry_after)})
    if error.kind is ErrorKind.FAILED:
        return ApiError(500, str(error), code="engine_error")
    return bad_request(str(error), field_of(str(error)), error.code)


def field_of(message: str) -> str | None:
    """The field that a message begins with, as those of values that are refused do: `temperature=-1 is ...`."""
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


@asynccontextmanager
async def grammar_errors_at(field: str, tools: ToolUse | None = None) -> AsyncIterator[None]:
    """Report a grammar that the engine rejects as an error of the tool that caused it, or else of `field`.

    Raises `ToolError` or `ApiError` 400.
    """
    try:
        yield
    except RequestError as error:
        why = refused_grammar(error)
        if why is None:
            raise
        at_fault = await asyncio.to_thread(tool_at_fault, error, tools)
        raise at_fault or bad_request(f"{field} can't be used: {why}", field) from None


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for name, replacement in names.items():
        text = text.replace(name, replacement)
    return text
