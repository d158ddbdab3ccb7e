"""Thoughts and tool calls through `/v1/responses` and `/v1/messages`, over several turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from anthropic.types import ToolUseBlock
from chat_templates import QWEN_THINKING
from http_server import Server, folder_of_demo_model
from openai import OpenAI
from openai.types.responses import ResponseFunctionToolCall

OPENS = "{%- if add_generation_prompt and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FLAT: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}
LOOK: Any = {"name": "look", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model with the chat template of a model that calls tools, and thinks on request."""
    folder = tmp_path_factory.mktemp("thinker")
    for file in folder_of_demo_model().iterdir():
        (folder / file.name).symlink_to(file)
    Path(folder / "chat_template.jinja").write_text(QWEN_THINKING + OPENS, encoding="utf-8")
    with Server.start("--served-model-name", "thinker", "--model", str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_thoughts_are_items_that_can_be_sent_back(openai: OpenAI) -> None:
    arguments: Any = {
        "model": "thinker",
        "temperature": 0,
        "max_output_tokens": 12,
        "tools": [FLAT],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    whole = openai.responses.create(input=TALE, **arguments)
    [item] = whole.output
    assert item.type == "reasoning"
    assert item.content is not None
    assert whole.output_text == ""
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= whole.usage.output_tokens == 12
    events = list(openai.responses.create(input=TALE, stream=True, **arguments))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text
    assert not [event for event in events if event.type == "response.output_text.delta"]
    back = openai.responses.create(input=[*TALE, item, *TALE], **arguments)
    assert back.usage is not None
    assert back.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.parametrize(
    ("thinking", "kind"),
    [
        ({"type": "enabled", "budget_tokens": 10}, "thinking"),
        ({"type": "adaptive"}, "thinking"),
        ({"type": "disabled"}, "text"),
    ],
)
def test_a_client_chooses_whether_the_model_thinks(anthropic: Anthropic, thinking: Any, kind: str) -> None:
    arguments: Any = {
        "model": "thinker",
        "max_tokens": 12,
        "messages": TALE,
        "thinking": thinking,
        "tools": [LOOK],
        "extra_body": {"temperature": 0},
    }
    whole = anthropic.messages.create(**arguments)
    assert [block.type for block in whole.content] == [kind]
    assert whole.stop_reason == "max_tokens"
    with anthropic.messages.stream(**arguments) as stream:
        [block] = stream.get_final_message().content
    assert getattr(block, kind) == getattr(whole.content[0], kind)
    back = anthropic.messages.create(
        **{**arguments, "messages": [*TALE, {"role": "assistant", "content": whole.content}, *TALE]}
    )
    assert back.usage.output_tokens == 12


def test_effort_none_turns_thinking_off(server: Server) -> None:
    """The template has no efforts, only a switch for thinking."""

    def count(path: str, **fields: Any) -> int:
        body = {"messages": TALE, "max_tokens": 1} if "chat" in path else {"input": TALE, "max_output_tokens": 1}
        usage = server.request(path, {**body, **fields}).json()["usage"]
        return int(usage.get("prompt_tokens") or usage["input_tokens"])

    def effort(path: str, value: str) -> Any:
        return {"reasoning_effort": value} if "chat" in path else {"reasoning": {"effort": value}}

    def kwargs(enable: bool) -> Any:
        return {"chat_template_kwargs": {"enable_thinking": enable}}

    for path in ("/v1/chat/completions", "/v1/responses"):
        plain, off, on = count(path), count(path, **kwargs(False)), count(path, **kwargs(True))
        assert len({plain, off, on}) == 3
        assert count(path, **effort(path, "none")) == off
        assert count(path, **effort(path, "minimal")) == plain
        assert count(path, **effort(path, "none"), **kwargs(True)) == on
    asked = {"messages": TALE, "output_config": {"effort": "none"}}
    counted = [
        server.request("/v1/messages/count_tokens", {**asked, **thinking}).json()["input_tokens"]
        for thinking in ({}, {"thinking": {"type": "adaptive"}})
    ]
    assert counted == [off, on]


def calls_of(items: Any, kind: Any) -> list[Any]:
    """Return the items after checking that all are calls of `look`."""
    assert all(isinstance(item, kind) and item.name == "look" for item in items)
    return list(items)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_a_response_calls_a_tool_and_accepts_its_result(openai: OpenAI, choice: Any) -> None:
    arguments: Any = {"model": "thinker", "temperature": 0, "tools": [FLAT]}
    forced: Any = {**arguments, "input": TALE, "tool_choice": choice, "parallel_tool_calls": False}
    whole = openai.responses.create(**forced)
    [call] = calls_of(whole.output, ResponseFunctionToolCall)
    assert (call.status, whole.status) == ("completed", "completed")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    with openai.responses.stream(**forced) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [streamed] = calls_of(stream.get_final_response().output, ResponseFunctionToolCall)
    assert "".join(deltas) == streamed.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    items = [*TALE, call, result]
    assert openai.responses.create(input=items, max_output_tokens=5, tool_choice="none", **arguments).output_text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_a_message_calls_a_tool_and_accepts_its_result(anthropic: Anthropic, choice: Any) -> None:
    arguments: Any = {"model": "thinker", "max_tokens": 99, "tools": [LOOK], "extra_body": {"temperature": 0}}
    forced: Any = {**arguments, "messages": TALE, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = anthropic.messages.create(**forced)
    [call] = calls_of(whole.content, ToolUseBlock)
    assert whole.stop_reason == "tool_use"
    jsonschema.validate(call.input, SCHEMA)
    with anthropic.messages.stream(**forced) as stream:
        [streamed] = calls_of(stream.get_final_message().content, ToolUseBlock)
    assert streamed.input == call.input
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]}
    messages = [*TALE, {"role": "assistant", "content": whole.content}, result]
    told = anthropic.messages.create(**{**arguments, "messages": messages, "tool_choice": {"type": "none"}})
    assert [block.type for block in told.content] == ["text"]


def test_several_calls_are_separate_items_and_blocks(openai: OpenAI, anthropic: Anthropic) -> None:
    """The demo model keeps calling until it is cut off, so the last call is incomplete."""
    response = openai.responses.create(
        model="thinker", temperature=0, input=TALE, tools=[FLAT], tool_choice="required", max_output_tokens=150
    )
    *calls, _ = calls_of(response.output, ResponseFunctionToolCall)
    assert len({call.call_id for call in calls}) == len(calls) > 1
    message = anthropic.messages.create(
        model="thinker",
        max_tokens=150,
        messages=TALE,
        tools=[LOOK],
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    )
    *uses, _ = calls_of(message.content, ToolUseBlock)
    assert [use.input for use in uses] == [json.loads(call.arguments) for call in calls]
    assert (response.status, message.stop_reason) == ("incomplete", "max_tokens")
