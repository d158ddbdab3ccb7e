"""Grammars are compiled for addresses in turn, and what compiles them may be lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from compiler_processes import compilers_of
from grammar_shapes import shaped
from http_server import Server
from patience import PATIENCE
from raw_http import RawConnection, post

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
PATHS = (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/completion")


def constrained(path: str) -> dict[str, Any]:
    """Return a request with a small schema, another one for each path."""
    schema = {"type": "object", "properties": {path: {"type": "integer"}}, "required": [path]}
    named = {"name": "a", "schema": schema}
    match path:
        case "/v1/completions":
            return {"prompt": "x", "max_tokens": 3, "structured_outputs": {"json": schema}}
        case "/v1/chat/completions":
            return {**ASKED, "stream": True, "response_format": {"type": "json_schema", "json_schema": named}}
        case "/v1/responses":
            return {"input": "x", "max_output_tokens": 16, "text": {"format": {"type": "json_schema", **named}}}
        case "/v1/messages":
            return {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
        case "/api/chat":
            return {"model": "quire-demo", "messages": ASKED["messages"], "stream": False, "format": schema}
        case _:
            return {"prompt": "x", "n_predict": 3, "json_schema": schema}


def slow(number: int) -> dict[str, Any]:
    """Return a request with a short grammar that takes long to compile, and is another one for each number."""
    grammar = f'{shaped("lark choice", "fan", 290).grammar}n{number}: "x"\n'
    return {"prompt": "x", "max_tokens": 1, "structured_outputs": {"grammar": grammar}}


def test_many_connections_of_an_address_keep_another_address_no_longer_than_one_does() -> None:
    with Server.start() as server, ThreadPoolExecutor(40) as pool:
        connections = [RawConnection(server.url) for _ in range(40)]
        for number, connection in enumerate(connections):
            connection.send(post(COMPLETIONS, slow(number)))
        replies = [pool.submit(connection.reply) for connection in connections]
        next(reply for reply in replies if reply.result().status == 200)
        with RawConnection(server.url, "127.0.0.2") as neighbour:
            answer = neighbour.send(post(COMPLETIONS, constrained(COMPLETIONS))).reply()
        num_before = sum(reply.done() for reply in replies)
        assert answer.status == 200
        assert num_before < 20
        assert all(reply.result().status == 200 for reply in replies)
        for connection in connections:
            connection.close()


@contextmanager
def compilers_killed(server: Server) -> Iterator[None]:
    """Kill whatever compiles grammars, and what takes its place as soon as it is there."""
    is_over, is_gone = threading.Event(), threading.Event()

    def kill() -> None:
        while not is_over.wait(0.005):
            processes = compilers_of(server.engine_pid)
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not processes:
                is_gone.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        assert is_gone.wait(PATIENCE)
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("path", PATHS)
def test_lost_compilers_are_an_error_that_passes(server: Server, path: str) -> None:
    with compilers_killed(server):
        reply = server.request(path, constrained(path))
    assert reply.status == 503, reply.body
    assert int(reply.headers["retry-after"]) >= 1
    assert "send it again" in reply.body.decode()
    assert "can't be used" not in reply.body.decode()
    assert server.request(path, constrained(path)).status == 200
