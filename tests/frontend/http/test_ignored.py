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


FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
NESTED = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
INPUT = {"name": "look", "input_schema": FUNCTION["parameters"]}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CODEX = [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, {"type": "local_shell"}]
ASK: dict[str, Any] = {"messages": [USER]}


@pytest.mark.parametrize(
    ("path", "body", "function", "hosted"),
    [
        ("/v1/chat/completions", {**ASK, "max_tokens": 4}, NESTED, [{"type": "web_search"}, {"type": "custom"}]),
        ("/v1/messages", {**ASK, "max_tokens": 4}, INPUT, [SEARCH, {"type": "bash_20250124", "name": "bash"}]),
        ("/v1/messages/count_tokens", ASK, INPUT, [SEARCH, SEARCH]),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}, FLAT, CODEX),
        ("/tokenize", ASK, NESTED, [{"type": "web_search"}, {"type": "custom"}]),
        ("/apply-template", ASK, NESTED, [{"type": "web_search"}, {"type": "custom"}]),
        ("/api/chat", {**ASK, "model": "quire-demo"}, NESTED, [{"type": "web_search"}, {"type": "custom"}]),
    ],
)
def test_tools_that_no_client_runs_are_skipped_beside_functions(
    server: Server, path: str, body: dict[str, Any], function: Any, hosted: list[Any]
) -> None:
    given = [hosted[0], function, hosted[1]]
    reply = server.request(path, {**body, "tools": given})
    first, second = (each["type"] for each in hosted)
    assert (reply.status, reply.headers["x-quire-ignored"]) == (200, f"tools[0] ({first}), tools[2] ({second})")
    if path == "/v1/responses":
        assert [tool["name"] for tool in reply.json()["tools"]] == ["look"]
    alone = server.request(path, {**body, "tools": hosted})
    assert alone.status == 400
    assert first in alone.body.decode()
    bad = server.request(path, {**body, "tools": [hosted[0], {**function, "nonsense": 1}]})
    assert bad.status == 400
    assert "tools[1]" in bad.body.decode()


def test_a_skipped_tool_cannot_be_chosen(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "web_search"}}
    asked = {**ASK, "tools": [{"type": "web_search"}, NESTED], "tool_choice": choice}
    reply = server.request("/v1/chat/completions", asked)
    assert "is 'web_search', which is not one of the tools: look" in reply.error["message"]


@pytest.mark.parametrize("given", ["low", "medium", "high", None])
def test_verbosity_is_ignored_and_listed(server: Server, given: str | None) -> None:
    chat = server.request("/v1/chat/completions", {**ASK, "max_tokens": 1, "verbosity": given})
    text = server.request("/v1/responses", {"input": "Hi", "max_output_tokens": 1, "text": {"verbosity": given}})
    assert (chat.status, text.status) == (200, 200)
    assert text.json()["text"]["verbosity"] == (given or "medium")
    listed = given in ("low", "high")
    assert chat.headers.get("x-quire-ignored") == ("verbosity" if listed else None)
    assert text.headers.get("x-quire-ignored") == ("text.verbosity" if listed else None)


def test_unknown_verbosity_is_refused(server: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {**ASK, "verbosity": "most"}),
        ("/v1/responses", {"input": "Hi", "text": {"verbosity": "most"}}),
    ):
        assert "it can be low, medium, high" in server.request(path, body).error["message"]


def test_hosted_calls_in_the_history_of_responses_are_listed(server: Server) -> None:
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    code = {"type": "code_interpreter_call", "id": "c", "status": "completed", "code": "1", "outputs": None}
    asked = {"input": [USER, search, code, USER], "include": ["web_search_call.action.sources"], "max_output_tokens": 1}
    reply = server.request("/v1/responses", asked)
    listed = "input[1] (web_search_call), input[2] (code_interpreter_call), include (web_search_call.action.sources)"
    assert (reply.status, reply.headers["x-quire-ignored"]) == (200, listed)


@pytest.mark.parametrize(
    ("path", "body", "tool", "choice", "where"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}, FLAT, {}, "tool_choice.tools"),
        ("/v1/chat/completions", {**ASK, "max_tokens": 4}, NESTED, None, "tool_choice.allowed_tools.tools"),
    ],
)
def test_hosted_tools_may_be_allowed_beside_functions(
    server: Server, path: str, body: dict[str, Any], tool: Any, choice: Any, where: str
) -> None:
    def chosen(tools: list[Any]) -> dict[str, Any]:
        allowed = {"mode": "auto", "tools": tools}
        return {"type": "allowed_tools", **(allowed if choice is not None else {"allowed_tools": allowed})}

    search, look = {"type": "web_search"}, {"name": "look"}
    named = {"type": "function", **(look if choice is not None else {"function": look})}
    asked = {**body, "tools": [search, tool]}
    reply = server.request(path, {**asked, "tool_choice": chosen([search, named])})
    assert (reply.status, reply.headers["x-quire-ignored"]) == (200, f"tools[0] (web_search), {where}[0] (web_search)")
    assert server.request(path, {**asked, "tool_choice": chosen([search])}).status == 400


def test_what_anthropics_server_did_before_is_read_or_listed(server: Server) -> None:
    done = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "Rome"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [{"type": "web_search_result", "title": "Rome", "url": "http://r", "encrypted_content": "x"}],
        },
        {"type": "text", "text": "Rome is a city."},
        {"type": "server_tool_use", "id": "s2", "name": "web_search", "input": {}},
    ]
    messages = [USER, {"role": "assistant", "content": done}, {**USER, "content": [{"type": "container_upload"}]}, USER]
    reply = server.request("/v1/messages", {"messages": messages, "max_tokens": 2})
    listed = "messages[1].content[0] (redacted_thinking), messages[1].content[4] (server_tool_use), "
    assert (reply.status, reply.headers["x-quire-ignored"]) == (
        200,
        f"{listed}messages[2].content[0] (container_upload)",
    )
    alone = server.request("/v1/messages", {"messages": [{"role": "assistant", "content": done[:1]}], "max_tokens": 2})
    assert "messages has no block that this server reads" in alone.body.decode()
