"""Grammars that would end whatever compiles them, by each way in: an error for their sender, and nothing for others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_shapes import shaped
from http_server import Server

SCHEMA = {**json.loads(str(shaped("$ref", "chain", 4000).json)), "type": "object"}
RULES = shaped("lark texts", "chain", 3000).grammar
GBNF = shaped("gbnf sequence", "chain", 1500).grammar
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
CUT = ASKED | {"truncate_prompt_tokens": 100}  # tools stand in the prompt too
PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 5}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (
        "/v1/chat/completions",
        ASKED | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    "json": ("/v1/completions", PROMPT | {"structured_outputs": {"json": SCHEMA}}),
    "grammar": ("/v1/completions", PROMPT | {"structured_outputs": {"grammar": RULES}}),
    "tool": ("/v1/chat/completions", CUT | {"tools": [FUNCTION], "tool_choice": "required"}),
    "strict tool": ("/v1/chat/completions", CUT | {"tools": [STRICT], "tool_choice": "auto"}),
    "Responses": ("/v1/responses", {"input": "x", "max_output_tokens": 16, "text": {"format": FORMAT}}),
    "Ollama": ("/api/chat", {"model": "quire-demo", "messages": ASKED["messages"], "stream": False, "format": SCHEMA}),
    "llama.cpp's grammar": ("/completion", {"prompt": "x", "n_predict": 4, "grammar": GBNF}),
    "llama.cpp's json_schema": ("/completion", {"prompt": "x", "n_predict": 4, "json_schema": SCHEMA}),
}


class Neighbour:
    """A stream of another client, which goes on until `stop`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.texts: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            body = {"prompt": "Once upon", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
            [choice] = self._server.request("/v1/completions", body).json()["choices"]
            assert choice["finish_reason"] == "length", choice
            self.texts.append(choice["text"])

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def neighbour(server: Server) -> Iterator[Neighbour]:
    made = Neighbour(server)
    yield made
    made.stop()


def engines(server: Server) -> list[str]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [pid for pid in children if b"quire.engine_core\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("way", WAYS)
def test_a_bomb_is_its_senders_error_and_no_one_elses(server: Server, neighbour: Neighbour, way: str) -> None:
    path, body = WAYS[way]
    before = engines(server)
    reply = server.request(path, body)
    assert reply.status == 400, reply.body[:300]
    assert "that are allowed" in reply.body.decode()
    assert engines(server) == before
    simple = PROMPT | {"structured_outputs": {"choice": ["yes", "no"]}}
    assert server.request("/v1/completions", simple).json()["choices"][0]["text"] in ("yes", "no")


def test_the_neighbours_answers_are_whole_and_the_same(neighbour: Neighbour) -> None:
    neighbour.stop()
    assert len(set(neighbour.texts)) == 1
