"""Errors of a connection, for requests that never reach the application."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.transport.logs import access_log
from quire.frontend.http.transport.responses import REQUEST_ID, request_id_of

MAX_HEADER_BYTES = 64 << 10  # request line and all headers; the same again for a body's framing


def serialized(error: ApiError, scope: Scope, default_headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Log an error and return the response that ends a connection with it."""
    response = _logged_response(error, scope)
    headers = [*default_headers, *response.raw_headers, (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", response.body])


async def too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request on an excess connection, as an ASGI application."""
    error = ApiError(
        503,
        "the server has reached its limit of connections; try again, or raise --max-connections",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )
    await _logged_response(error, scope)(scope, receive, send)


def _logged_response(error: ApiError, scope: Scope) -> Response:
    """Log an error and return its response, which carries the request id of the log."""
    response = error.response()
    request_id = response.headers[REQUEST_ID] = scope.setdefault("request_id", request_id_of(Headers(scope=scope)))
    access_log(scope, error.status, 0.0, len(response.body), request_id)
    return response


def headers_too_large() -> ApiError:
    """Return the error for headers that are not read to their end."""
    return ApiError(
        431, f"the headers exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones", code="headers_too_large"
    )


def not_http(error: BaseException) -> ApiError:
    """Return the error for input that is no request."""
    return bad_request(f"this is not valid HTTP/1.1: {error}", code="invalid_http")
