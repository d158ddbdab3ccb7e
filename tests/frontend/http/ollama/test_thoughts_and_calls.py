"""Thoughts and tool calls in Ollama's API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from chat_answers import numbered_ids, pieces
from chat_templates import QWEN_THINKING
from demo_copies import model_with_template
from http_server import Server
from hypothesis import given
from hypothesis import strategies as st
from ollama import Client

from quire.frontend.http.conversation import INVALID_JSON, AnswerDelta
from quire.frontend.http.dialects.ollama.body import OllamaChatBody, chat_messages
from quire.frontend.http.dialects.ollama.writer import ChatAnswerWriter
from quire.frontend.http.transport.bodies import decode
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.tools import check_tools

MODEL = "thinker"
OPENS = "{%- if add_generation_prompt and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]
GREEDY: Any = {"temperature": 0, "num_predict": 12}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOK: Any = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
FORMAT = AnswerFormat("hermes", "qwen3")
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"n": [1, "é"]}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model with the chat template of a model that calls tools, and thinks on request."""
    folder = model_with_template(Path(tmp_path_factory.mktemp("models")) / MODEL, QWEN_THINKING + OPENS)
    with Server.start("--served-model-name", MODEL, "--model", str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def ollama(server: Server) -> Client:
    return Client(host=server.url)


@pytest.mark.parametrize("think", [True, "low", "high"])
def test_thoughts_have_a_field_of_their_own(ollama: Client, think: Any) -> None:
    whole = ollama.chat(MODEL, TALE, think=think, options=GREEDY)
    assert whole.message.thinking
    assert whole.message.content == ""
    parts = list(ollama.chat(MODEL, TALE, think=think, options=GREEDY, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    generated = ollama.generate(MODEL, TALE[0]["content"], think=think, options=GREEDY)
    assert (generated.thinking, generated.response) == (whole.message.thinking, "")
    back = ollama.chat(MODEL, [*TALE, whole.message, {"role": "user", "content": "Go on"}], options=GREEDY)
    assert back.eval_count == 12


def test_thinking_can_be_turned_off(ollama: Client, server: Server) -> None:
    off = ollama.chat(MODEL, TALE, think=False, options=GREEDY)
    assert off.message.thinking is None
    assert off.message.content
    plain = ollama.chat(MODEL, TALE, options=GREEDY)
    assert plain.prompt_eval_count != off.prompt_eval_count
    unknown = server.request("/api/chat", {"messages": TALE, "think": "extreme"})
    assert (unknown.status, "think='extreme' is not known" in unknown.json()["error"]) == (400, True)
    raw = server.request("/api/generate", {"prompt": "x", "raw": True, "think": True})
    assert (raw.status, "raw=true leaves out" in raw.json()["error"]) == (400, True)


def test_tools_and_their_results_are_in_the_prompt(server: Server) -> None:
    conversation = [
        *TALE,
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Rome"}}}]},
        {"role": "tool", "tool_name": "look", "content": "Sunny."},
    ]
    asked = {"messages": conversation, "tools": [LOOK], "options": GREEDY, "stream": False}
    answer = server.request("/api/chat", asked).json()
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
    same = [
        *TALE,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "Sunny."},
    ]
    body = {"messages": same, "tools": [LOOK], "temperature": 0, "max_tokens": 12}
    expected = server.request("/v1/chat/completions", body).json()
    assert answer["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]


def look(city: str) -> str:
    """Look at a city.

    Args:
        city: Where to look.

    """
    return city


def test_a_function_of_pythons_client_is_a_tool(ollama: Client) -> None:
    with_tool = ollama.chat(MODEL, TALE, tools=[look], options=GREEDY)
    without = ollama.chat(MODEL, TALE, options=GREEDY)
    assert (with_tool.prompt_eval_count or 0) > (without.prompt_eval_count or 0)


def test_a_call_reaches_the_client_whole_and_streamed(ollama: Client) -> None:
    """The demo model calls the tool where the format leaves it no other text that it likes."""
    asked: Any = {"model": MODEL, "messages": TALE, "tools": [LOOK], "think": False, "format": {"const": 7}}
    options = {"temperature": 0, "num_predict": 60}
    calls = ollama.chat(**asked, options=options).message.tool_calls
    assert calls
    assert all(each.function.name == "look" and each.function.arguments["city"] in {"Rome", "Oslo"} for each in calls)
    lines = ollama.chat(**asked, options=options, stream=True)
    assert [each for line in lines for each in line.message.tool_calls or []] == calls


def test_bad_tools_are_named(server: Server) -> None:
    for tool, words in (
        ({"type": "function", "function": {"name": ""}}, "tools[0].function.name"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
            "tools[0].function.parameters",
        ),
        ({"type": "retrieval"}, "tools[0]"),
    ):
        reply = server.request("/api/chat", {"messages": TALE, "tools": [tool]})
        assert reply.status == 400
        assert words in reply.json()["error"]


def written(texts: list[str], reason: str = "stop", stop: str | None = None) -> tuple[list[Any], Any]:
    """Return the lines of an answer that arrives as `texts`, and the whole answer."""
    writer = ChatAnswerWriter(cast("Any", None), cast("Any", None), "m", 0.0)
    parser = FORMAT.parser("", check_tools([LOOK]), numbered_ids())
    lines: list[Any] = []
    for index, text in enumerate(texts):
        is_last = index == len(texts) - 1
        events = parser.feed(text) + (parser.finish() if is_last else [])
        completion = CompletionOutput(0, text, [1], finish_reason=reason if is_last else None, stop_reason=stop)
        output = RequestOutput("r", None, [1, 2], None, [completion], is_last, RequestMetrics(0.0))
        end = (completion.finish_reason, stop)
        delta = AnswerDelta(events, completion, output, parser.finish_reason(*end), parser.cuts_call(*end))
        lines += writer._take(delta)
    return lines, writer._answer


@given(st.data())
def test_a_call_is_in_one_line_whole(data: st.DataObject) -> None:
    texts = data.draw(pieces(f"<think>\nHm.\n</think>\nI look.\n{CALLS}"))
    lines, whole = written(texts)
    made = [call for line in lines for call in line.message.tool_calls or []]
    assert [(call.id, call.function.index, call.function.name, call.function.arguments) for call in made] == [
        ("call_0", 0, "look", {"city": "Rome"}),
        ("call_1", 1, "look", {"n": [1, "é"]}),
    ]
    assert whole.message.tool_calls == made
    assert "".join(line.message.thinking or "" for line in lines) == whole.message.thinking == "Hm."
    assert "".join(line.message.content for line in lines).strip() == whole.message.content.strip() == "I look."
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (whole.done_reason, lines[-1].done_reason, whole.eval_count) == ("stop", "stop", len(texts))


CUT = '<tool_call>\n{"name": "look", "arguments": {"city": "Ro'


@pytest.mark.parametrize(("reason", "stop"), [("length", None), ("timeout", None), ("stop", "me")])
def test_a_call_that_is_cut_off_is_none(reason: str, stop: str | None) -> None:
    lines, whole = written([f"I look.{CUT}"], reason, stop)
    assert all(not line.message.tool_calls for line in [*lines, whole])
    assert (whole.message.content, lines[-1].done_reason) == ("I look.", "stop" if reason == "stop" else "length")
    lines, whole = written([CALLS, CUT], reason, stop)
    assert len(whole.message.tool_calls) == 2


def test_arguments_that_the_model_leaves_open_keep_their_text() -> None:
    [call] = written([CUT])[0][0].message.tool_calls
    assert call.function.arguments == {INVALID_JSON: '{"city": "Ro'}


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"a": 1}}, **more}


def ids_of_results(*messages: dict[str, Any]) -> list[str | None]:
    """Return the ids of the calls that the results among `messages` are of."""
    body = asyncio.run(decode(msgspec.json.encode({"messages": messages}), OllamaChatBody))
    return [each.get("tool_call_id") for each in chat_messages(body.messages or []) if each["role"] == "tool"]


def test_results_find_their_calls() -> None:
    def result(**more: Any) -> dict[str, Any]:
        return {"role": "tool", "content": "x", **more}

    made = {"role": "assistant", "tool_calls": [call("f"), call("g"), call("f", id="mine")]}
    assert ids_of_results(made, result(), result(), result()) == ["call00000", "call00001", "mine"]
    assert ids_of_results(made, result(tool_name="g"), result(tool_name="f"), result(tool_name="f")) == [
        "call00001",
        "call00000",
        "mine",
    ]
    assert ids_of_results(made, result(tool_call_id="mine"), result(tool_name="f"), result(tool_name="f")) == [
        "mine",
        "call00000",
        "call00001",
    ]
    assert ids_of_results(result(), result(tool_name="h")) == [None, None]
