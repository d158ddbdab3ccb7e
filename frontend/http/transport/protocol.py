"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on header size and on slow sending and reading."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.transport.auth import CONNECTION
from quire.frontend.http.transport.flow import ReadingFlow, ResponseTransport
from quire.frontend.http.transport.old_http import adapt_to_old_client, is_old
from quire.frontend.http.transport.pending_input import PendingInput
from quire.frontend.http.transport.rejections import (
    MAX_HEADER_BYTES,
    headers_too_large,
    not_http,
    serialized,
    too_many_connections,
)
from quire.frontend.http.transport.turns import ParserTurns

_MOST_PENDING = 64 << 10  # bytes that wait to be parsed while more are read, so that a disconnect is noticed
_TURN_AWAY_SECONDS = 1.0  # for the request on an excess connection, so that it gets an error
_LINGER_SECONDS = 5.0  # for the rest of a body after its response
_CONNECTIONS = itertools.count()  # their numbers


def protocol_factory(args: ServerArgs) -> type[asyncio.Protocol]:
    """Return the class for the `http` argument of `uvicorn.Config`."""
    return cast("type[asyncio.Protocol]", functools.partial(HttpProtocol, args, ParserTurns()))


class HttpProtocol(HttpToolsProtocol):
    """One connection. A timer runs while it owes no response, so that none stays open unused.

    Input is parsed in turns with other connections, up to the end of a request; what follows waits for the response.
    uvicorn's own protocol accepts headers of any size for any time, answers malformed requests in plain text, loses
    the body of a request that offers an upgrade, and misses the disconnect of a client that has pipelined a request.
    """

    def __init__(
        self,
        args: ServerArgs,
        turns: ParserTurns,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: next(_CONNECTIONS)}, _loop)
        self._args = args
        self._turns = turns
        self._input = PendingInput()
        self._body_left = 0  # bytes that a body of known length lacks
        self._parts: list[bytes] = []  # of the body, in the slice that is being parsed
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
        self.flow = self._reading = ReadingFlow(transport)
        self.address = "" if self.client is None else self.client[0]
        if len(self.connections) > self._args.max_connections:
            self.app = too_many_connections
            self._limit_reading(_TURN_AWAY_SECONDS)
        else:
            self._limit_reading(self._args.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the open response that the client is gone."""
        self._input.clear()
        self._stop_read_timer()
        self._stop_write_timer()
        if self._running is not None:
            self._drop(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take input, and parse it now or in its turn."""
        if self._is_ending:
            return
        self._unset_keepalive_if_required()
        self._input.add(data)
        self._turns.parse(self)
        if self._input:
            self._hold_reading()

    def parse_slice(self) -> bool:
        """Parse some of the input. A malformed request gets an error, and ends the connection."""
        if not self._can_parse:
            return False
        part = self._input.take(self._body_left)
        self._num_framing_bytes += len(part)
        try:
            self._feed(part)
        except httptools.HttpParserError as error:
            cause = error.__context__ or error  # raised by one of the parser's callbacks below
            self._refuse(cause if isinstance(cause, ApiError) else not_http(cause))
            return False
        self._pass_on_body()
        if self._num_framing_bytes > MAX_HEADER_BYTES:
            self._refuse(headers_too_large())
        elif not self._owes_response:
            self._limit_reading(self._args.header_timeout)
        if self._reading.is_held:
            self._hold_reading()
        return self._can_parse

    @property
    def _can_parse(self) -> bool:
        """True if there is input, unless it begins a request that comes after one without its response."""
        if not self._input or self._is_ending or self.transport.is_closing():
            return False
        return self._is_reading_body or not self._owes_response

    def _hold_reading(self) -> None:
        """Read on while little input waits."""
        is_full = len(self._input) > _MOST_PENDING
        if is_full != self._reading.is_held:
            self._reading.hold(is_full, self._owes_response and len(self.cycle.body) > HIGH_WATER_LIMIT)

    def _feed(self, part: memoryview) -> None:
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            self._input.put_back(len(part) - upgrade.args[0])
        else:
            return
        # Decline the upgrade by replaying the head without it: this parser treats what follows as another protocol.
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([line, *kept, b"", b""]))

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
            raise headers_too_large()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise bad_request("CONNECT asks for a proxy, and this server is none; send requests to it directly")
            return
        self._is_reading_head, self._is_reading_body = False, True
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", ResponseTransport(self.transport, self._end))
        self._body_left = _content_length(self.headers)
        self._stop_read_timer()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, of which a slice may have hundreds."""
        self._parts.append(body)

    def _pass_on_body(self) -> None:
        if not self._parts:
            return
        self._num_framing_bytes = 0
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if self._is_reading_head:  # it will be replayed without its upgrade, or is ignored
            return
        self._pass_on_body()
        self._is_reading_body = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._turns.charge_request(len(self.headers))
        if is_old(cycle.scope["http_version"]):
            adapt_to_old_client(cycle)
        super()._start_asgi_task(cycle, app)

    def _end(self) -> None:
        """Close, but first let a client that is still sending read its response, which a reset would discard."""
        if self.transport.is_closing() or not (self._is_reading_head or self._is_reading_body or self._input):
            self.transport.close()
            return
        self._is_ending = True
        self._input.clear()
        self._hold_reading()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    # Limits.

    @property
    def _owes_response(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

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
        """Parse the next request, or wait for it, but not long for the rest of a body that was not read."""
        super().on_response_complete()
        if self._can_parse:
            self._unset_keepalive_if_required()
            self._turns.queue(self)
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
            self.transport.write(serialized(error, scope, self.server_state.default_headers))
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

    @staticmethod
    def _drop(cycle: RequestResponseCycle) -> None:
        if not cycle.response_complete:
            cycle.disconnected = True
        cycle.message_event.set()


def _content_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the length of a body, which the parser has checked; 0 if its end is found by parsing."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)
