"""Content blocks: the model's answer becomes Anthropic's blocks, and these become messages of a chat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic.types import ContentBlock, MessageParam, RawMessageStreamEvent
from chat_answers import numbered_ids
from pydantic import TypeAdapter

from quire.frontend.http.conversation import INVALID_JSON
from quire.frontend.http.dialects.anthropic.body import chat_messages, ignored_blocks, tool_use
from quire.frontend.http.dialects.anthropic.errors import anthropic_error
from quire.frontend.http.dialects.anthropic.writer import Content
from quire.frontend.http.dialects.registry import dialect_at
from quire.frontend.http.errors import ApiError
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import parse_answer
from quire.frontend.text.chat.messages import check_messages
from quire.frontend.text.chat.tools import ToolChoice, check_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BLOCK: TypeAdapter[Any] = TypeAdapter(ContentBlock)
LOOK: Any = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
NESTED = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
FORMAT = AnswerFormat("hermes", "think")
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"n": [1, "é"]}}\n</tool_call>'
)
ANSWERS = ["A tale.", "<think>\nHm.\n</think>\n\nA tale.", CALLS, f"<think>\nHm.\n</think>\n\nI look.\n{CALLS}"]
USER: Any = {"role": "user", "content": "Rome?"}


def converted(messages: list[dict[str, Any]], system: Any = None) -> list[dict[str, Any]]:
    return chat_messages(messages, system, ignored_blocks(messages))


def streamed(pieces: str | list[str], shows_thinking: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the blocks of an answer that arrives as `pieces`, and its events."""
    parser = FORMAT.parser("", check_tools([NESTED]), numbered_ids())
    content = Content(shows_thinking)
    sent = [
        msgspec.to_builtins(each)
        for events in [*map(parser.feed, pieces), parser.finish()]
        for each in content.take(events)
    ]
    sent += [msgspec.to_builtins(each) for each in content.end()]
    return msgspec.to_builtins(content.blocks), sent


@pytest.mark.parametrize("text", ANSWERS)
def test_blocks_are_the_same_however_the_answer_arrives(text: str) -> None:
    blocks, sent = streamed(text)
    assert streamed([text])[0] == blocks
    for event in sent:
        EVENT.validate_python(event)
    for index, block in enumerate(blocks):
        BLOCK.validate_python(block)
        kinds = [event["type"] for event in sent if event["index"] == index]
        assert (kinds[0], kinds[-1]) == ("content_block_start", "content_block_stop")
        deltas = [event["delta"] for event in sent if event["index"] == index and "delta" in event]
        key = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block["type"]]
        grown = "".join(delta[key] for delta in deltas)
        assert (msgspec.json.decode(grown) if key == "partial_json" else grown) == block.get(key, block.get("input"))


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_sent_back_becomes_the_same_message(text: str) -> None:
    answer = {"role": "assistant", "content": streamed(text)[0]}
    TypeAdapter(MessageParam).validate_python(answer)
    message = parse_answer(text, FORMAT.parser("", check_tools([NESTED]), numbered_ids())).as_message()
    back = check_messages(converted([USER, answer]))[1]
    expected = check_messages([message])[0]
    assert {**back, "content": back["content"] or ""} == {**expected, "content": expected["content"] or ""}


def test_thoughts_may_be_left_out() -> None:
    blocks, sent = streamed(ANSWERS[1], shows_thinking=False)
    assert blocks[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert blocks[1]["text"] == "A tale."
    assert [event["type"] for event in sent if event["index"] == 0] == ["content_block_start", "content_block_stop"]


def test_an_incomplete_call_keeps_its_text() -> None:
    [block], _ = streamed('<tool_call>\n{"name": "look", "arguments": {"city": "Ro')
    assert block["input"] == {INVALID_JSON: '{"city": "Ro'}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_blocks_become_a_chat() -> None:
    messages: Any = [
        USER,
        {"role": "user", "content": [{"type": "text", "text": "Now."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny."},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "No city."}],
                    "is_error": True,
                },
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    TypeAdapter(list[MessageParam]).validate_python(messages)
    functions = [{"name": "look", "arguments": {"city": "Rome"}}, {"name": "look", "arguments": {}}]
    calls = [{"id": f"t{index}", "type": "function", "function": each} for index, each in enumerate(functions, start=1)]
    assert converted(messages, [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Look."}]) == [
        {"role": "system", "content": parts("Be brief.", "Look.")},
        {"role": "user", "content": parts("Rome?", "Now.")},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: No city."},
        {"role": "user", "content": "Well?"},
    ]


def test_results_of_servers_tools_become_results_of_calls() -> None:
    def call(number: int, name: str, kind: str = "server_tool_use") -> dict[str, Any]:
        return {"type": kind, "id": f"s{number}", "name": name, "input": {}, "server_name": "m"}

    def result(number: int, kind: str, content: Any, **more: Any) -> dict[str, Any]:
        return {"type": f"{kind}_tool_result", "tool_use_id": f"s{number}", "content": content, **more}

    found = {"type": "web_search_result", "title": "Rome", "url": "http://r", "encrypted_content": "x", "page_age": "1"}
    source = {"type": "text", "media_type": "text/plain", "data": "Rome is a city."}
    page = {"type": "document", "title": "Rome", "source": source}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    ran = {"type": "code_execution_result", "stdout": "4", "stderr": "", "return_code": 0, "content": []}
    blocks = [
        *(call(1, "web_search"), result(1, "web_search", [found])),
        *(
            call(2, "web_fetch"),
            result(2, "web_fetch", {"type": "web_fetch_result", "url": "http://r", "content": page}),
        ),
        *(
            call(3, "web_fetch"),
            result(3, "web_fetch", {"type": "web_fetch_result", "url": "http://p", "content": pdf}),
        ),
        *(call(4, "code_execution"), result(4, "code_execution", ran)),
        *(call(5, "web_search"), result(5, "web_search", {"type": "e", "error_code": "unavailable"})),
        *(call(6, "ask", "mcp_tool_use"), result(6, "mcp", [{"type": "text", "text": "No."}], is_error=True)),
        {"type": "text", "text": "Four."},
        call(7, "web_search"),
        result(8, "web_search", []),
    ]
    _, *messages = converted([USER, {"role": "assistant", "content": blocks}])
    results = {each["tool_call_id"]: each["content"] for each in messages if each["role"] == "tool"}
    assert results == {
        "s1": "Rome\nhttp://r",
        "s2": "http://r\nRome\nRome is a city.",
        "s3": "http://p",
        "s4": "4",
        "s5": "unavailable",
        "s6": "Error: No.",
    }
    made = [each["id"] for message in messages for each in message.get("tool_calls", ())]
    assert made == list(results)
    assert messages[-1] == {"role": "assistant", "content": "Four."}


def test_a_tool_result_may_be_empty() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
    block = {"type": "tool_result", "tool_use_id": "t", "content": None, "is_error": None}
    [*_, result] = converted([USER, call, {"role": "user", "content": [block]}])
    assert result == {"role": "tool", "tool_call_id": "t", "content": ""}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "look"}, ToolChoice("required", ("look",), named=True)),
    ],
)
def test_tools_become_those_of_chat_completions(choice: Any, expected: ToolChoice) -> None:
    use = tool_use([LOOK], choice)
    assert use is not None
    assert use.for_template() == [NESTED]
    assert (use.choice, use.parallel) == (expected, not expected.named)
    alone = tool_use([LOOK], {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True})
    assert alone is not None
    assert not alone.parallel


def test_errors_about_tools_have_anthropics_field_names() -> None:
    with pytest.raises(ApiError, match=r"tools\[0\].name is 'a b'"):
        tool_use([{**LOOK, "name": "a b"}], None)
    with pytest.raises(ApiError, match=r"tools\[0\].defer_loading is not supported"):
        tool_use([{**LOOK, "defer_loading": True}], None)
    with pytest.raises(ApiError, match=r"tool_choice.name is 'find', which is not one of the tools"):
        tool_use([LOOK], {"type": "tool", "name": "find"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    body = msgspec.to_builtins(anthropic_error(ApiError(status, "words"), "req"))
    assert body == {"type": "error", "error": {"type": kind, "message": "words"}, "request_id": "req"}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/messages", "Anthropic"),
        ("/v1/messages/count_tokens", "Anthropic"),
        ("/v1/messages/x/y", "Anthropic"),
        ("/api/chat", "Ollama"),
        ("/v1/messagesx", None),
        ("/v1/messages\n", None),
        ("/completion", None),
        ("/api", None),
        ("/", None),
    ],
)
def test_errors_have_the_shape_of_the_api_at_their_path(path: str, name: str | None) -> None:
    dialect = dialect_at(path)
    assert (None if dialect is None else dialect.name) == name
