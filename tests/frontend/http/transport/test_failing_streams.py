"""Answers that are cut off when the engine dies or is stopped: each API reports the error in its own shape."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any, cast

from engine_watch import EngineWatch, halted
from http_server import Server, events_of
from openai.types.responses import Response
from patience import PATIENCE
from raw_http import RawConnection, post

LONG: Any = {"format": {"type": "json_schema", "schema": {"type": "array", "items": {"enum": [1]}, "minItems": 800}}}
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]

ENDLESS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True},
    "/v1/chat/completions": {"messages": TALE, "max_tokens": 1900, "ignore_eos": True},
    "/v1/responses": {"input": "Tell me a tale", "max_output_tokens": 1900, "ignore_eos": True},
    "/v1/messages": {"messages": TALE, "max_tokens": 1900, "output_config": LONG},
    "/api/chat": {"messages": TALE, "format": LONG["format"]["schema"], "model": "quire-demo"},
    "/completion": {"prompt": "Once upon a time", "n_predict": 1900, "ignore_eos": True},
}
"""Requests to each API that a test outlives."""

CROWD: Any = {**ENDLESS["/v1/completions"], "n": 32}
"""A request whose many sequences make all steps long, so that no other ends by itself."""


def post_to(server: Server, path: str, body: dict[str, Any]) -> RawConnection:
    return RawConnection(server.url).send(post(path, body))


def begin(server: Server, path: str, body: dict[str, Any]) -> tuple[HTTPResponse, bytes]:
    """Begin a stream; return its response and the bytes up to the first delta."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    reply = cast("HTTPResponse", urllib.request.urlopen(request, timeout=PATIENCE))
    sent = b""
    while b"delta" not in sent:
        sent += reply.readline()
    return reply, sent


@contextmanager
def crowded(server: Server) -> Iterator[EngineWatch]:
    """Have the engine compute CROWD."""
    with EngineWatch(server) as watch, post_to(server, "/v1/completions", CROWD):
        watch.until(lambda step: step.stats is not None and step.stats.decode_tokens == CROWD["n"])
        yield watch


def kill_engine(server: Server) -> None:
    os.kill(server.engine_pid, signal.SIGKILL)


def test_a_failed_stream_ends_with_an_error_event() -> None:
    with Server.start("--max-restarts", "0") as server, crowded(server):
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


def test_an_answer_that_a_stopped_engine_ends_is_an_error_in_every_api() -> None:
    """An operator stops the engine, which ends the requests beyond its time limit in good order."""
    with Server.start("--shutdown-timeout", "0", "--log-level", "error") as server, crowded(server) as watch:
        streams = {path: post_to(server, path, {**body, "stream": True}) for path, body in ENDLESS.items()}
        wholes = {path: post_to(server, path, {**body, "stream": False}) for path, body in ENDLESS.items()}
        watch.wait_for(running=CROWD["n"] + 2 * len(ENDLESS))
        watch.shut_down()
        watch.wait_for()  # an answer of the next iteration of its loop, which has begun its time limit
        with halted(watch.pid):  # a fast engine would finish within its time limit
            time.sleep(6)
        replies = {path: connection.reply() for path, connection in wholes.items()}
        sent = {path: connection.begin_reply().read() for path, connection in streams.items()}
        assert server.process.wait(PATIENCE) == 1
    for path, reply in replies.items():
        assert reply.status == 503, (path, reply)
        assert "shut down" in reply.body.decode() or "was stopped" in reply.body.decode()
    for path, body in sent.items():
        text = body.decode()
        last = [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line][-1]
        assert last.get("type") == "response.failed" if "responses" in path else "error" in last, (path, last)
        assert not re.search(r'"(finish_reason|done_reason|stop_reason|stop_type)": ?"', text), path
        assert not re.search(r'"(done|stop)": ?true', text), path
