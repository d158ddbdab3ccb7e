"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on header size and on slow sending and reading."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Any, cast

import httptools
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.transport.auth import CONNECTION
from quire.frontend.http.transport.logs import access_log
from quire.frontend.http.transport.responses import REQUEST_ID, request_id_of

MAX_HEADER_BYTES = 64 << 10  # request line and all headers; the same again for a body's framing
_TURN_AWAY_SECONDS = 1.0  # for the request on an excess connection, so that it gets an error
_LINGER_SECONDS = 5.0  # for the rest of a body after its response
_CONNECTIONS = itertools.count()  # their numbers


def protocol_factory(args: ServerArgs) -> type[asyncio.Protocol]:
    """Return the class for the `http` argument of `uvicorn.Config`."""
    return cast("type[asyncio.Protocol]", functools.partial(HttpProtocol, args))


class HttpProtocol(HttpToolsProtocol):
    """One connection. A timer runs while it owes no response, so that none stays open unused.

    uvicorn's own protocol accepts headers of any size for any time, answers malformed requests in plain text, loses
    the body of a request that offers an upgrade, and misses the disconnect of a client that has pipelined a request.
    """

    def __init__(
        self,
        args: ServerArgs,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: next(_CONNECTIONS)}, _loop)
        self._args = args
        self._num_framing_bytes = 0  # headers, chunk sizes and trailers since the last byte of a body
        self._is_reading_head = False
        self._is_reading_body = False
        self._is_ending = False  # the response is written, and further input is ignored
        self._running: RequestResponseCycle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self._args.max_connections:
            self.app = _too_many_connections
            self._limit_reading(_TURN_AWAY_SECONDS)
        else:
            self._limit_reading(self._args.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the open response that the client is gone."""
        self._stop_read_timer()
        self._stop_write_timer()
        if self._running is not None:
            self._drop(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse input. A malformed request gets an error, and ends the connection."""
        if self._is_ending:
            return
        self._unset_keepalive_if_required()
        self._num_framing_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ or error  # raised by one of the parser's callbacks below
            self._refuse(cause if isinstance(cause, ApiError) else _not_http(cause))
            return
        if self._num_framing_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
        elif not self._owes_response:
            self._limit_reading(self._args.header_timeout)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        else:
            return
        # Decline the upgrade by replaying the head without it: this parser treats what follows as another protocol.
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        line = self.parser.get_method() + b" " + self.url + b" HTTP/1.1"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([line, *kept, b"", b""]) + rest)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._is_reading_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; trailers, which follow a body, are ignored."""
        if self._is_reading_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the response, if the headers are not too large."""
        self._num_framing_bytes = 0
        if self._is_ending or self.transport.is_closing():  # this request arrived together with the one before
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            raise _headers_too_large()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise bad_request("CONNECT asks for a proxy, and this server is none; send requests to it directly")
            return
        self._is_reading_head, self._is_reading_body = False, True
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", _ResponseTransport(self.transport, self._end))
        self._stop_read_timer()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._num_framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if self._is_reading_head:  # it will be replayed without its upgrade, or is ignored
            return
        self._is_reading_body = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _end(self) -> None:
        """Close, but first let a client that is still sending read its response, which a reset would discard."""
        if self.transport.is_closing() or not (self._is_reading_head or self._is_reading_body):
            self.transport.close()
            return
        self._is_ending = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    # Limits.

    @property
    def _owes_response(self) -> bool:
        newest = cast("RequestResponseCycle | None", self.cycle)  # None at first, whatever uvicorn declares
        return newest is not None and not newest.response_complete

    def _limit_reading(self, seconds: float) -> None:
        """End the connection unless a request has begun within `seconds` of the first call."""
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(seconds, self._read_too_long, seconds)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _read_too_long(self, seconds: float) -> None:
        if not self._is_reading_head:
            self.transport.close()
            return
        message = f"the headers did not arrive within {seconds:g} s; send them faster"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def on_response_complete(self) -> None:
        """Wait for the next request, but not long for the rest of a body that was not read."""
        super().on_response_complete()
        if self._is_reading_body and not self._owes_response and not self._is_ending:
            self._limit_reading(_LINGER_SECONDS)

    def pause_writing(self) -> None:
        """Start the timer of a client that does not keep up with reading."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._args.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read on."""
        super().resume_writing()
        self._stop_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """Reject a request, as uvicorn asks."""
        self._refuse(bad_request(msg))

    def _refuse(self, error: ApiError) -> None:
        """End the connection, with `error` as the response to the last input."""
        if self.transport.is_closing():
            return
        if self._owes_response and not self._is_reading_body:  # earlier requests get their responses first
            self.cycle.keep_alive = False
            self._is_ending = True
            return
        running = self._running
        if not self._owes_response or (running is not None and not running.response_started and not self.pipeline):
            scope = self._unparsed_scope if running is None or not self._owes_response else cast("Scope", running.scope)
            self.transport.write(self._serialized(error, scope))
        if running is not None:
            self._drop(running)
        self._end()

    @property
    def _unparsed_scope(self) -> dict[str, Any]:
        """The scope of a request whose headers can't be parsed."""
        return {
            "method": "-",
            "path": "-",
            "headers": self.headers if self._is_reading_head else [],
            "client": self.client,
        }

    def _serialized(self, error: ApiError, scope: Scope) -> bytes:
        response = _logged_response(error, scope)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", response.body])

    @staticmethod
    def _drop(cycle: RequestResponseCycle) -> None:
        if not cycle.response_complete:
            cycle.disconnected = True
        cycle.message_event.set()


class _ResponseTransport:
    """The transport as one response sees it: closing it waits for the rest of the request."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
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


def _headers_too_large() -> ApiError:
    return ApiError(
        431, f"the headers exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones", code="headers_too_large"
    )


def _not_http(error: BaseException) -> ApiError:
    return bad_request(f"this is not valid HTTP/1.1: {error}", code="invalid_http")
