"""Slow, oversized, malformed and excess connections, and clients that misstate what they send."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import pytest
from engine_watch import halted
from http_server import Reply, Server
from patience import PATIENCE
from raw_http import RawConnection, post

COMPLETIONS = "/v1/completions"
GOOD = {"prompt": "Once upon", "max_tokens": 1}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve the demo model with limits on sizes and connections, and no timeout that a test reaches."""
    limits = ["--max-body-bytes", str(MIB), "--max-connections", "8"]
    for name in ("header-timeout", "body-timeout", "keep-alive"):
        limits += [f"--{name}", str(PATIENCE)]
    with Server.start(*limits) as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """Serve the demo model with short timeouts."""
    with Server.start("--header-timeout", "0.5", "--body-timeout", "0.5", "--keep-alive", "1") as server:
        yield server


def connected(server: Server, data: bytes) -> RawConnection:
    """Connect and send while the server is halted, so that no time passes for it in between."""
    with halted(server.process.pid):
        return RawConnection(server.url).send(data)


@pytest.fixture
def connection(server: Server) -> Iterator[RawConnection]:
    with RawConnection(server.url) as connection:
        yield connection


def logged(server: Server, reply: Reply, status: int) -> bool:
    """Wait for the access log's line with the id of a response."""
    end, wanted = f"request {reply.headers['x-request-id']}\n", f" {status} in "
    deadline = time.monotonic() + PATIENCE
    while not any(wanted in line and line.endswith(end) for line in list(server.log)):
        assert time.monotonic() < deadline, server.log[-5:]
    return True


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        pytest.param(b"HELLO\r\n\r\n", 400, "invalid_http", id="no HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400, "invalid_http", id="TLS"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http", id="HTTP/2"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http", id="unknown version"),
        pytest.param(b"GET http://[ HTTP/1.1\r\n\r\n", 400, "invalid_http", id="bad URL"),
        pytest.param(b"GET /\xff HTTP/1.1\r\n\r\n", 400, "invalid_http", id="bytes in the URL"),
        pytest.param(b"GET / HTTP/1.1\r\nA b: c\r\n\r\n", 400, "invalid_http", id="bad header name"),
        pytest.param(b"GET / HTTP/1.1\r\nA: b\x00\r\n\r\n", 400, "invalid_http", id="NUL in a header"),
        pytest.param(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400, None, id="CONNECT"),
        pytest.param(HEAD + b"Content-Length: -1\r\n\r\n", 400, "invalid_http", id="negative length"),
        pytest.param(HEAD + b"Content-Length: 9" + b"9" * 30 + b"\r\n\r\n", 400, "invalid_http", id="huge length"),
        pytest.param(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "invalid_http", id="two lengths"),
        pytest.param(CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400, "invalid_http", id="smuggled length"),
        pytest.param(HEAD + b"Transfer-Encoding: xchunked\r\n\r\n", 400, "invalid_http", id="unknown transfer"),
        pytest.param(CHUNKED + b"zz\r\n{}\r\n", 400, "invalid_http", id="bad chunk size"),
        pytest.param(CHUNKED + b"2\r\n{}}\r\n0\r\n\r\n", 400, "invalid_http", id="chunk too long"),
        pytest.param(b"GET /" + b"a" * 99_999, 431, "headers_too_large", id="endless URL"),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"a" * 99_999, 431, "headers_too_large", id="endless header"),
        pytest.param(
            b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431, "headers_too_large", id="long header"
        ),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 20_000, 431, "headers_too_large", id="many headers"),
        pytest.param(CHUNKED + b"2;" + b"a" * 400_000, 431, "headers_too_large", id="endless chunk extension"),
        pytest.param(CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: a\r\n" * 50_000, 431, "headers_too_large", id="trailers"),
    ],
)
def test_a_malformed_request_gets_an_error_and_ends_the_connection(
    server: Server, connection: RawConnection, data: bytes, status: int, code: str | None
) -> None:
    reply = connection.send(data).reply()
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (status, code, "close")
    assert connection.is_closed()
    assert logged(server, reply, status)
    assert server.request(COMPLETIONS, GOOD).status == 200


@pytest.mark.parametrize(
    ("data", "status", "part"),
    [
        pytest.param(post(COMPLETIONS, b"x" * (MIB + 1)), 413, "1048577 bytes", id="too large"),
        pytest.param(post(COMPLETIONS, b"x" * (16 * MIB)), 413, "--max-body-bytes", id="much too large"),
        pytest.param(post(COMPLETIONS, b"", length=1 << 40), 413, "1099511627776 bytes", id="declared too large"),
        pytest.param(CHUNKED + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 20, 413, "1048576", id="too large in chunks"),
        pytest.param(CHUNKED + b"0\r\n\r\n", 400, "the body is empty", id="no chunk"),
        pytest.param(HEAD + b"\r\n", 400, "the body is empty", id="no length"),
        pytest.param(post(COMPLETIONS, GOOD, length=5), 400, "not JSON", id="length too small"),
    ],
)
def test_an_unacceptable_body_gets_an_error_that_clients_can_read(
    server: Server, connection: RawConnection, data: bytes, status: int, part: str
) -> None:
    reply = connection.send(data).reply()
    assert (reply.status, part in reply.error["message"]) == (status, True), reply.body
    assert server.request(COMPLETIONS, GOOD).status == 200


@pytest.mark.parametrize(
    ("data", "part"),
    [
        pytest.param(b"GET /health HTTP/1.1\r\nHost:", "the headers did not arrive within 0.5 s", id="slow headers"),
        pytest.param(post(COMPLETIONS, GOOD, length=99), "within 0.5 s (40 bytes did)", id="too short"),
        pytest.param(CHUNKED + b"26\r\n{", "(1 bytes did)", id="too slow in chunks"),
    ],
)
def test_a_slow_request_gets_408_and_ends_the_connection(hasty: Server, data: bytes, part: str) -> None:
    with connected(hasty, data) as connection:
        reply = connection.reply()
        assert (reply.status, reply.error["code"], part in reply.error["message"]) == (408, "request_timeout", True)
        assert connection.is_closed()
        assert logged(hasty, reply, 408)


def test_rejected_headers_keep_the_clients_request_id(server: Server, connection: RawConnection) -> None:
    reply = connection.send(b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\nA: " + b"a" * 99_999).reply()
    assert (reply.status, reply.headers["x-request-id"]) == (431, "mine")
    assert logged(server, reply, 431)


def test_a_response_before_the_end_of_the_body_reaches_a_client_that_asks_to_close(connection: RawConnection) -> None:
    request = post(COMPLETIONS, b"x" * (16 * MIB), "Connection: close")
    assert connection.send(request).reply().status == 413
    assert connection.is_closed()


def test_bodies_in_chunks_with_trailers_are_read(connection: RawConnection) -> None:
    body = b'{"prompt":"Once upon","max_tokens":1}'
    parts = b"".join(b"1;why=not\r\n%c\r\n" % byte for byte in body)
    trailer = b"0\r\nX-Request-Timeout: never\r\nX-Request-Id: mine\r\n\r\n"
    reply = connection.send(CHUNKED + parts + trailer).reply()
    assert reply.status == 200
    assert reply.headers["x-request-id"] != "mine"  # trailers are ignored
    assert connection.send(HEALTH).reply().status == 200


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_an_upgrade_is_declined_and_the_request_served(connection: RawConnection, offer: str) -> None:
    headers = ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offer}", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"]
    request = post(COMPLETIONS, GOOD, *headers)
    assert connection.send(request).reply().status == 200
    connection.send(request[:-10])
    assert connection.send(request[-10:]).reply().status == 200


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_pipelined_requests_that_offer_an_upgrade_are_all_answered(
    server: Server, connection: RawConnection, offer: str
) -> None:
    head = f"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: {offer}\r\n\r\n".encode()
    connection.send(head * 2 + HEALTH + head.replace(b"Connection: ", b"Connection: close, "))
    data = b"".join(iter(lambda: connection.socket.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200"] * 4
    assert [data.count(b'"version"'), data.count(b'"status"')] == [3, 1]
    assert not [line for line in server.log if "Fatal" in line]


def test_expect_100_continue_is_answered_only_if_the_body_is_acceptable(server: Server) -> None:
    body = b'{"prompt":"Once upon","max_tokens":1}'
    with RawConnection(server.url) as wanted:
        wanted.send(post(COMPLETIONS, b"", "Expect: 100-continue", length=len(body)))
        assert wanted.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert wanted.send(body).reply().status == 200
    with RawConnection(server.url) as unwanted:
        assert unwanted.send(post(COMPLETIONS, b"", "Expect: 100-continue", length=2 * MIB)).reply().status == 413


def test_pipelined_requests_are_answered_in_order_and_garbage_after_them_gets_an_error_that_ends_the_connection(
    connection: RawConnection,
) -> None:
    connection.send(HEALTH + post(COMPLETIONS, GOOD) + b"GET /version HTTP/1.1\r\n\r\nRUBBISH\r\n\r\n")
    # http.client can't read several responses from one buffer, so they are counted.
    data = b"".join(iter(lambda: connection.socket.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"200", b"200", b"400"]
    assert data.index(b'"status"') < data.index(b'"text_completion"') < data.index(b'"version"')


@pytest.mark.parametrize("sent", [b"", b"\r\n", HEALTH], ids=["nothing", "a line break", "a request"])
def test_idle_connections_are_closed(hasty: Server, sent: bytes) -> None:
    with connected(hasty, sent) as connection:
        if sent == HEALTH:
            assert connection.reply().status == 200
        assert connection.is_closed()


def test_the_rest_of_an_unread_body_does_not_keep_a_connection_open(server: Server) -> None:
    with RawConnection(server.url) as connection:
        connection.send(post("/v1/nothing", b"", length=MIB))
        assert connection.reply().status == 404
        assert connection.is_closed()


def test_excess_connections_get_503_and_others_continue(server: Server) -> None:
    first = [RawConnection(server.url) for _ in range(8)]
    try:
        for connection in first:  # all have been accepted
            assert connection.send(HEALTH).reply().status == 200
        with connected(server, post(COMPLETIONS, GOOD)) as extra:
            reply = extra.reply()
            assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
            assert int(reply.headers["retry-after"]) >= 1
            assert logged(server, reply, 503)
            assert extra.is_closed()
        assert first[0].send(HEALTH).reply().status == 200
    finally:
        for connection in first:
            connection.close()


def test_unknown_methods_and_paths_get_errors_in_openais_shape(server: Server) -> None:
    unknown = server.request("/v1/nothing")
    assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")
    wrong = server.request(COMPLETIONS)
    assert (wrong.status, wrong.error["message"], wrong.headers["allow"]) == (405, wrong.error["message"], "POST")
    for method in ("OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"):
        reply = server.request("/health", method=method)
        assert (reply.status, reply.error["type"]) == (405, "invalid_request_error")
        assert "GET" in reply.headers["allow"]
    head = server.request("/health", method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert server.request("//health").status == 404
    assert server.request("/v1/models/..%2f..%2fetc%2fpasswd").status == 404


def test_a_reset_in_the_middle_of_a_request_is_harmless(server: Server) -> None:
    whole = post(COMPLETIONS, GOOD)
    for length in (1, len(whole) // 2, len(whole) - 1):
        with RawConnection(server.url) as connection:
            connection.send(whole[:length])
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    assert server.request(COMPLETIONS, GOOD).status == 200
