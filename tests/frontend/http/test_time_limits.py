"""An answer that its time limit cuts off ends with a reason that the clients of each API know."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from anthropic.types import StopReason
from http_server import Server
from openai.types.chat.chat_completion import Choice
from openai.types.responses.response import IncompleteDetails

ASK = [{"role": "user", "content": "Tell me a tale"}]
LONG: dict[str, Any] = {"ignore_eos": True}


def cut_off(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Return an answer that has begun when its time is up."""
    limit = 0.05
    while (reply := server.request(path, body, headers={"X-Request-Timeout": str(limit)})).status == 504:
        limit *= 2  # a busy machine has no token by then
    assert reply.status == 200
    return reply.json()


@pytest.fixture(scope="module")
def slow() -> Any:
    """Serve the demo model."""
    with Server.start() as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_completions_end_as_by_a_limit(slow: Server, path: str) -> None:
    asked: dict[str, Any] = {"messages": ASK} if "chat" in path else {"prompt": "Once"}
    [choice] = cut_off(slow, path, {**asked, **LONG, "max_tokens": 1900})["choices"]
    assert choice["finish_reason"] in get_args(Choice.model_fields["finish_reason"].annotation)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")


def test_responses_are_incomplete(slow: Server) -> None:
    answer = cut_off(slow, "/v1/responses", {"input": "Once", **LONG, "max_output_tokens": 1900})
    assert answer["status"] == "incomplete"
    assert IncompleteDetails.model_validate(answer["incomplete_details"]).reason == "max_output_tokens"
    [known, _] = get_args(IncompleteDetails.model_fields["reason"].annotation)
    assert answer["incomplete_details"]["reason"] in get_args(known)


def test_messages_and_ollamas_answers_end_as_by_a_limit(slow: Server) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 900}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = cut_off(slow, "/v1/messages", {"messages": ASK, "max_tokens": 1900, "output_config": config})
    assert message["stop_reason"] in get_args(StopReason)
    assert message["stop_reason"] == "max_tokens"
    answer = cut_off(slow, "/api/chat", {"messages": ASK, "model": "quire-demo", "stream": False, "format": schema})
    assert answer["done_reason"] == "length"
