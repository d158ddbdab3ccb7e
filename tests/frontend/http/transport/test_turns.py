"""Input is parsed in turns: a flood of it leaves the loop to others, and every request is read as it was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from quire.frontend.http.args import ServerArgs
from quire.frontend.http.transport.protocol import HttpProtocol
from quire.frontend.http.transport.turns import ParserTurns

PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /%d HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MOST_STARTED = 10
"""Requests of all connections that begin in one turn of the loop, and a few more."""


@dataclass
class Application:
    """Reads requests and answers them; `seen`: address, method, path and body of each, in the order of their ends."""

    seen: list[tuple[str, str, str, bytes]] = field(default_factory=list)
    num_started: int = 0
    num_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_started += 1
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
            self.num_bytes += len(message["body"])
        self.seen.append((scope["client"][0], scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


class Wire(asyncio.Transport):
    """The transport of a connection from `address` that sends nothing by itself."""

    def __init__(self, protocol: HttpProtocol, address: str) -> None:
        super().__init__()
        self.address, self.written, self.is_read = address, b"", True
        self.protocol, self._is_closing = protocol, False
        protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        """Let input arrive."""
        self.protocol.data_received(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.address, 1) if name in ("peername", "sockname") else default

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    @property
    def num_answers(self) -> int:
        """The number of answers that were written."""
        return self.written.count(b"HTTP/1.1 200 OK")


class Site:
    """A server without sockets. Its clock ticks once for each slice, so that a turn has a number of them."""

    def __init__(self) -> None:
        self.app = Application()
        self._config = uvicorn.Config(cast("Any", self.app), ws="none", lifespan="off", log_config=None, loop="none")
        self._state = ServerState()
        self._now = 0.0
        self._turns = ParserTurns(self._tick)

    def _tick(self) -> float:
        self._now += 0.0005
        return self._now

    def connect(self, address: str = "client") -> Wire:
        """Return a new connection."""
        return Wire(HttpProtocol(ServerArgs(), self._turns, self._config, self._state, {}), address)

    async def turns_until(self, is_over: Callable[[], bool], measure: Callable[[], int]) -> list[int]:
        """Take turns of the loop until `is_over`; return by how much each changed what is measured."""
        changes, last = list[int](), measure()
        while not is_over():
            await asyncio.sleep(0)
            changes.append(measure() - last)
            last = measure()
        return changes


def on_site(act: Callable[[Site], Awaitable[None]]) -> None:
    """Call `act` on an event loop."""

    async def run() -> None:
        await act(Site())

    asyncio.run(run())


def test_a_flood_of_requests_on_many_connections_leaves_turns_to_others() -> None:
    async def act(site: Site) -> None:
        wires = [site.connect() for _ in range(32)]
        for wire in wires:
            wire.send(PING * 25)
        begun = await site.turns_until(lambda: len(site.app.seen) == 800, lambda: site.app.num_started)
        assert max(begun) <= MOST_STARTED
        assert [wire.num_answers for wire in wires] == [25] * 32

    on_site(act)


def test_new_connections_with_a_request_each_leave_turns_to_others() -> None:
    async def act(site: Site) -> None:
        for _ in range(200):
            site.connect().send(PING)
        begun = await site.turns_until(lambda: len(site.app.seen) == 200, lambda: site.app.num_started)
        assert max(begun) <= MOST_STARTED

    on_site(act)


def test_a_body_in_tiny_chunks_is_read_in_small_parts_and_whole() -> None:
    async def act(site: Site) -> None:
        wire, body = site.connect(), bytes(range(256)) * 128
        wire.send(CHUNKED % 1 + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        parts = await site.turns_until(lambda: bool(site.app.seen), lambda: site.app.num_bytes)
        assert site.app.seen == [("client", "POST", "/1", body)]
        assert max(parts) <= len(body) / 8

    on_site(act)


def test_connections_of_one_address_share_its_turns() -> None:
    async def act(site: Site) -> None:
        for _ in range(50):
            site.connect("many").send(PING * 20)
        site.connect("one").send(PING)
        await site.turns_until(lambda: ("one", "GET", "/ping", b"") in site.app.seen, lambda: 0)
        assert len(site.app.seen) <= 3 * MOST_STARTED

    on_site(act)


def test_a_client_that_reads_no_answers_has_one_request_at_work_and_its_input_waits() -> None:
    async def act(site: Site) -> None:
        wire = site.connect()
        wire.protocol.pause_writing()
        wire.send(PING * 5000)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (site.app.num_started, wire.num_answers, wire.is_read) == (1, 0, False)
        wire.protocol.resume_writing()
        await site.turns_until(lambda: wire.num_answers == 5000, lambda: 0)
        assert wire.is_read

    on_site(act)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
BODIES = st.binary(max_size=60) | st.sampled_from([b"\r\n\r\n", PING, b"\r\n" * 3, b"x" * 5000])


def request(number: int, body: bytes | None, sizes: list[int], offers: bool) -> bytes:
    """Return a request without a body, with a length, or, with sizes, in chunks; maybe one that offers an upgrade."""
    extra = UPGRADE if offers else b""
    if body is None:
        return b"GET /%d HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (number, extra)
    if not sizes:
        head = b"POST /%d HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n"
        return head % (number, extra, len(body)) + body
    chunks, rest = list[bytes](), body
    while rest:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(b"%x\r\n%s\r\n" % (len(rest[:size]), rest[:size]))
        rest = rest[size:]
    return CHUNKED[:-2] % number + extra + b"\r\n" + b"".join(chunks) + b"0\r\n\r\n"


REQUESTS = st.lists(
    st.tuples(st.none() | BODIES, st.lists(st.integers(1, 3000), max_size=3), st.booleans()), min_size=1, max_size=6
)


@given(REQUESTS, st.lists(st.integers(1, 400), max_size=8))
def test_pipelined_requests_are_read_as_they_were_sent_wherever_they_are_cut(
    requests: list[tuple[bytes | None, list[int], bool]], cuts: list[int]
) -> None:
    async def act(site: Site) -> None:
        wire = site.connect()
        data = b"".join(request(number, *each) for number, each in enumerate(requests))
        for cut in cuts:
            wire.send(data[:cut])
            data = data[cut:]
            await asyncio.sleep(0)
        wire.send(data)
        await site.turns_until(lambda: wire.num_answers == len(requests) or wire.is_closing(), lambda: 0)
        assert [seen[1:] for seen in site.app.seen] == [
            ("GET" if body is None else "POST", f"/{number}", body or b"")
            for number, (body, _, _) in enumerate(requests)
        ]

    on_site(act)


def test_the_parser_takes_no_end_of_a_head_but_an_empty_line() -> None:
    for end in (b"\n\n", b"\r\n\n", b"\n\r\n", b"\r\r", b"\n\r"):
        ends = list[bool]()

        class User:
            def on_message_complete(self, ends: list[bool] = ends) -> None:
                ends.append(True)

        with contextlib.suppress(httptools.HttpParserError):
            httptools.HttpRequestParser(User()).feed_data(b"GET / HTTP/1.1\r\nHost: localhost" + end)
        assert not ends, end
