"""Keys of messages that other servers add to answers are ignored when they come back, and a header lists them."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import Server

USER = {"role": "user", "content": "Tell me a tale"}
ANSWER = {
    "role": "assistant",
    "content": "Once",
    "reasoning_details": [{"type": "reasoning.text", "text": "Hm"}],
    "provider_specific_fields": {"a": 1},
    "audio": None,
    "else": None,
}
ASKED = [USER, ANSWER, {**USER, "name": None}]
LISTED = "messages[].provider_specific_fields, messages[].reasoning_details"


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key in ("choices", "content", "output", "tokens", "prompt")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"temperature": 0, "max_tokens": 4}),
        ("/v1/chat/completions", {"temperature": 0, "max_tokens": 4, "stream": True}),
        ("/v1/messages", {"temperature": 0, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {}),
        ("/api/chat", {"model": "quire-demo", "options": {"temperature": 0, "num_predict": 4}, "stream": False}),
        ("/tokenize", {}),
        ("/apply-template", {}),
    ],
)
def test_unknown_keys_of_messages_are_ignored_and_listed(server: Server, path: str, body: dict[str, Any]) -> None:
    reply = server.request(path, {**body, "messages": ASKED})
    assert (reply.status, reply.headers["x-quire-ignored"]) == (200, LISTED)
    plain = server.request(path, {**body, "messages": [USER, {"role": "assistant", "content": "Once"}, USER]})
    assert "x-quire-ignored" not in plain.headers
    if not body.get("stream"):
        assert without_times(reply.json()).keys() == without_times(plain.json()).keys()


def test_items_of_responses_too(server: Server) -> None:
    item = {"type": "message", "id": "m", "status": "completed", **ANSWER}
    reply = server.request("/v1/responses", {"input": [USER, item, USER], "max_output_tokens": 4})
    assert (reply.status, reply.headers["x-quire-ignored"]) == (200, LISTED.replace("messages", "input"))


def test_ollamas_calls_may_have_other_keys(server: Server) -> None:
    call = {"function": {"name": "f", "arguments": {}, "description": "x"}, "extra_content": {"a": 1}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "f", "content": "1"}]
    reply = server.request("/api/chat", {"messages": messages, "model": "quire-demo", "options": {"num_predict": 1}})
    assert reply.status == 200


def test_the_header_holds_no_more_than_a_header_should(server: Server) -> None:
    keys = {f"k{index:03}\r\né,": 1 for index in range(1000)} | {"l" * 5000: 1}
    reply = server.request("/tokenize", {"messages": [{**USER, **keys}]})
    assert reply.status == 200
    assert reply.headers["x-quire-ignored"].startswith("messages[].k000????, messages[].k001????, ")
    assert reply.headers["x-quire-ignored"].endswith(", messages[].k015????, and 985 more")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("images", ["aGk="], "only text is supported"), ("prefix", True, "continue_final_message")],
)
def test_keys_with_a_meaning_are_refused(server: Server, key: str, value: Any, words: str) -> None:
    reply = server.request("/v1/chat/completions", {"messages": [{**USER, key: value}], "max_tokens": 1})
    assert reply.status == 400
    assert reply.error["message"].startswith(f"messages[0].{key} is not supported")
    assert words in reply.error["message"]
