"""Streams that are cut off when the engine dies: each API reports the error in its own shape."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast

from http_server import Server, events_of
from openai.types.responses import Response
from patience import PATIENCE

LONG: Any = {"format": {"type": "json_schema", "schema": {"type": "array", "items": {"enum": [1]}, "minItems": 800}}}
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]


def begin(server: Server, path: str, body: dict[str, Any]) -> tuple[HTTPResponse, bytes]:
    """Begin a stream; return its response and the bytes up to the first delta."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    reply = cast("HTTPResponse", urllib.request.urlopen(request, timeout=PATIENCE))
    sent = b""
    while b"delta" not in sent:
        sent += reply.readline()
    return reply, sent


def kill_engine(server: Server) -> None:
    [engine] = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    os.kill(int(engine), signal.SIGKILL)


def test_a_failed_stream_ends_with_an_error_event() -> None:
    with Server.start("--max-restarts", "0") as server:
        long = {"max_output_tokens": 1900, "ignore_eos": True}
        responses = begin(server, "/v1/responses", {"input": "Tell me a tale", **long})
        messages = begin(server, "/v1/messages", {"messages": TALE, "max_tokens": 1900, "output_config": LONG})
        kill_engine(server)
        of_responses, of_messages = (events_of(sent + reply.read()) for reply, sent in (responses, messages))
        assert server.process.wait(PATIENCE) == 1
    *_, error, failed = of_responses
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "engine_dead", len(of_responses) - 2)
    assert failed["type"] == "response.failed"
    response = Response.model_validate(failed["response"])
    assert response.status == "failed"
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", error["message"])
    last = of_messages[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert last["request_id"]
