"""Items of responses: the model's answer becomes items, and these become messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from chat_answers import numbered_ids
from openai.types.responses import ResponseInputItemParam, ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.frontend.http.errors import ApiError
from quire.frontend.http.openai.responses.body import messages_of, tool_use
from quire.frontend.http.openai.responses.writer import ResponseOutput
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import parse_answer
from quire.frontend.text.chat.events import Event
from quire.frontend.text.chat.messages import check_messages
from quire.frontend.text.chat.tools import check_tools

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}
NESTED: Any = [{"type": "function", "function": {key: LOOK[key] for key in ("name", "parameters", "strict")}}]
FORMAT = AnswerFormat("hermes", "think")
ANSWERS = {
    "words": "A tale.",
    "nothing": "",
    "thoughts and words": "<think>\nHm.\n</think>\n\nA tale.",
    "thoughts without end": "<think>\nHm.",
    "a call": '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>',
    "thoughts, words and calls": '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {}}\n'
    '</tool_call>\n<tool_call>\n{"name": "look", "arguments": {"n": [1, "é"]}}\n</tool_call>',
}
HALF_A_CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Ro'


def events_of(pieces: Iterable[str]) -> list[list[Event]]:
    parser = FORMAT.parser("", check_tools(NESTED), numbered_ids())
    return [*map(parser.feed, pieces), parser.finish()]


def streamed(pieces: Iterable[str], status: str = "completed") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the items of an answer that arrives as `pieces`, and its events."""
    output = ResponseOutput()
    sent = [msgspec.to_builtins(each) for events in events_of(pieces) for each in output.take(events, [])]
    sent += [msgspec.to_builtins(each) for each in output.end(status)]
    return msgspec.to_builtins(output.items), sent


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


@pytest.mark.parametrize("text", [*ANSWERS.values(), HALF_A_CALL], ids=[*ANSWERS, "half a call"])
def test_items_are_the_same_however_the_answer_arrives(text: str) -> None:
    whole, _ = streamed([text])
    items, sent = streamed(text)
    assert without_ids(items) == without_ids(whole)
    for event in sent:
        EVENT.validate_python(event)
    for item in items:
        ITEM.validate_python(item)
    done = [event for event in sent if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == items
    assert [event["output_index"] for event in done] == list(range(len(items)))
    for item in items:
        about = [event for event in sent if event.get("item_id") == item["id"]]
        grown = "".join(event["delta"] for event in about if event["type"].endswith(".delta"))
        assert grown == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_sent_back_becomes_the_same_message(text: str) -> None:
    message = parse_answer(text, FORMAT.parser("", check_tools(NESTED), numbered_ids()))
    items, _ = streamed(text)
    TypeAdapter(list[ResponseInputItemParam]).validate_python(items)
    [back] = check_messages(messages_of(items, None))
    [expected] = check_messages([message.as_message()])
    assert {**back, "content": back["content"] or ""} == {**expected, "content": expected["content"] or ""}


def test_an_item_that_is_cut_off_is_incomplete() -> None:
    items, sent = streamed(ANSWERS["thoughts and words"], "incomplete")
    assert [item["status"] for item in items] == ["completed", "incomplete"]
    assert sent[-1]["item"]["status"] == "incomplete"


def test_input_items_become_a_chat() -> None:
    items: Any = [
        {"role": "developer", "content": "Look first."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Rain."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "Done."},
        {"type": "local_shell_call", "call_id": "c4", "action": {"type": "exec", "command": ["ls"]}, "id": "l"},
        {"type": "local_shell_call_output", "call_id": "c4", "output": "a.py"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "Rome"}},
        {"role": "user", "content": "Go on."},
    ]
    patch = {"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}}
    shell = {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}
    functions = [{"name": "look", "arguments": {"city": "Rome"}}, {"name": "look", "arguments": {}}]
    calls = [{"id": f"c{index}", "type": "function", "function": each} for index, each in enumerate(functions, start=1)]
    assert messages_of(items, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Look first."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "c2", "content": "Rain."},
        {
            "role": "assistant",
            "content": "Sunny.",
            "tool_calls": [{"id": "c3", "type": "function", "function": patch}],
        },
        {"role": "tool", "tool_call_id": "c3", "content": "Done."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c4", "type": "function", "function": shell}],
        },
        {"role": "tool", "tool_call_id": "c4", "content": "a.py"},
        {"role": "user", "content": "Go on."},
    ]


def test_a_call_of_an_mcp_tool_becomes_a_call_with_its_result() -> None:
    call = {"type": "mcp_call", "id": "m", "server_label": "s", "name": "ask", "arguments": '{"n": 1}'}
    function = {"name": "ask", "arguments": {"n": 1}}
    for end, text in (({"output": "Yes."}, "Yes."), ({"output": None, "error": "Gone."}, "Gone.")):
        assert messages_of([{**call, **end}], None) == [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "m", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "m", "content": text},
        ]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "computer_call", "id": "m"}, r"input\[0\] is of type 'computer_call'"),
        ({"type": "mcp_call", "id": "m"}, r"input\[0\].name is missing"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}, "no call before it has this call_id"),
        ({"type": "item_reference", "id": "msg_1"}, "references are not resolved"),
        ({"id": "msg_1"}, "references are not resolved"),
        ({"role": "tool", "content": "x"}, r"input\[0\].role"),
        ({"role": "user"}, r"input\[0\].content is missing"),
        ({"role": "user", "content": [{"type": "input_file"}]}, r"input\[0\].content\[0\] .* reads no files"),
        ({"role": "user", "content": [{"type": "input_text", "text": 1}]}, r"content\[0\].text is a int"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}, "arguments is not a JSON object"),
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "no call before it"),
        ({"type": ["message"]}, "is of type"),
    ],
)
def test_invalid_items_are_rejected(item: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        messages_of([item], None)
    assert refused.value.status == 400


def test_flat_tools_become_those_of_chat_completions() -> None:
    for flat, nested in [
        ("required", "required"),
        ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]},
            },
        ),
    ]:
        assert tool_use([LOOK], flat, False) == check_tools(NESTED, nested, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tool", "choice", "words"),
    [
        ({"type": "web_search"}, None, "no tools of its own"),
        ({**LOOK, "name": "a b"}, None, r"tools\[0\].name is 'a b'"),
        ({**LOOK, "defer_loading": True}, None, "defer_loading"),
        (LOOK, {"type": "function", "name": "find"}, "tool_choice.name is 'find'"),
        (LOOK, {"type": "function"}, r'tool_choice is .*; give {"type": "function", "name": ...}'),
    ],
)
def test_errors_about_tools_have_the_flat_field_names(tool: Any, choice: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        tool_use([tool], choice, None)
