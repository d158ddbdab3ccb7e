"""Clients of HTTP/1.0, such as a proxy that speaks it to its servers: a body ends with its length or its connection."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_server import Server, events_of
from raw_http import RawConnection, post

MESSAGES = [{"role": "user", "content": "Tell me a tale."}]
SAMPLING = {"temperature": 0, "stream": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 3, **SAMPLING},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, **SAMPLING},
    "/v1/responses": {"input": "Tell me a tale.", "max_output_tokens": 3, **SAMPLING},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3, **SAMPLING},
    "/completion": {"prompt": "Once upon", "n_predict": 3, **SAMPLING},
    "/api/generate": {"prompt": "Once upon", "options": {"num_predict": 3}},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 3}},
    "/api/pull": {"model": "quire-demo"},
}


def exchange(server: Server, request: bytes) -> tuple[bytes, bytes]:
    """Send a request; return the head of the response, and what follows until the connection ends."""
    with RawConnection(server.url) as connection:
        received = b""
        connection.send(request)
        while part := connection.socket.recv(1 << 16):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def headers_of(head: bytes) -> dict[str, str]:
    """Return the headers of a response by their names in lower case."""
    lines = head.decode().split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def old(request: bytes) -> bytes:
    """Return a request as an old client would send it."""
    return request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_its_connection(server: Server, path: str) -> None:
    head, body = exchange(server, old(post(path, STREAMS[path])))
    headers = headers_of(head)
    assert head.startswith(b"HTTP/1.1 200 "), head
    assert (headers.get("transfer-encoding"), headers["connection"]) == (None, "close")
    lines = body.decode().splitlines()
    if path.startswith("/api/"):
        assert [json.loads(line) for line in lines][-1].get("done", True)
    else:
        assert all(line == "" or line.startswith(("data: ", "event: ")) for line in lines), lines
        assert events_of(body)
    assert body.endswith(b"\n")


def test_streams_to_both_versions_have_the_same_events(server: Server) -> None:
    request = post("/v1/completions", {**STREAMS["/v1/completions"], "request_id": "a"})
    with RawConnection(server.url) as connection:
        new = events_of(connection.send(request).reply().body)
    _, body = exchange(server, old(request))
    texts = [[event["choices"][0]["text"] for event in events[:-1]] for events in (new, events_of(body))]
    assert "".join(texts[0]) == "".join(texts[1]) != ""
    assert events_of(body)[-1] == "[DONE]"


def test_a_whole_answer_to_http_1_0_has_a_length_and_keeps_its_end(server: Server) -> None:
    head, body = exchange(server, old(post("/v1/completions", {**STREAMS["/v1/completions"], "stream": False})))
    headers = headers_of(head)
    assert (headers["connection"], int(headers["content-length"])) == ("close", len(body))
    assert json.loads(body)["choices"][0]["finish_reason"] == "length"


def test_http_1_0_gets_no_interim_response(server: Server) -> None:
    request = post("/v1/completions", {"prompt": "Once upon", "max_tokens": 1}, "Expect: 100-continue")
    head, _ = exchange(server, old(request))
    assert head.startswith(b"HTTP/1.1 200 ")


def test_a_refused_stream_to_http_1_0_has_its_error_whole(server: Server) -> None:
    head, body = exchange(server, old(post("/v1/completions", {"prompt": [], "stream": True})))
    assert (head.split()[1], headers_of(head)["content-length"]) == (b"400", str(len(body)))
