"""Answers in the harmony format of gpt-oss through each API, by a model with its special tokens under grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from demo_copies import CALL_ID, CHANNEL_ID, harmony_model
from http_server import Server
from openai import BadRequestError, OpenAI

from quire.frontend import LLM, SamplingParams, StructuredOutputsParams

LOOK: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "at": {"type": "integer", "minimum": 0, "maximum": 23}},
    "required": ["city", "at"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}]
FLAT: Any = [{"type": "function", "name": "look", "parameters": LOOK, "strict": True}]
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
BODY: Any = {"model": "oss", "messages": ASK, "temperature": 1, "seed": 3, "max_tokens": 400}
THINKS: Any = {str(CHANNEL_ID): 100}
CALLS: Any = {str(CHANNEL_ID): -100}  # so that a header begins with the recipient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model whose template and tokens are those of gpt-oss."""
    folder = harmony_model(tmp_path_factory.mktemp("models") / "oss")
    with Server.start(str(folder), "--served-model-name", "oss") as server:
        yield server


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def streamed(openai: OpenAI, **body: Any) -> dict[str, Any]:
    """Return the answer as a client assembles it from the deltas."""
    found: dict[str, Any] = {"content": "", "thoughts": "", "calls": [], "reason": None}
    for chunk in openai.chat.completions.create(stream=True, **body):
        for part in chunk.choices:
            found["content"] += part.delta.content or ""
            found["thoughts"] += (part.delta.model_extra or {}).get("reasoning_content") or ""
            for call in part.delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    found["calls"].append([call.function.name, ""])
                found["calls"][call.index][1] += call.function.arguments or ""
            found["reason"] = part.finish_reason
    return found


def test_a_constraint_applies_to_the_final_channel(openai: OpenAI) -> None:
    body: Any = {**BODY, "logit_bias": THINKS, "n": 4}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": LOOK}}
    choices = openai.chat.completions.create(**body).choices
    assert any((choice.message.model_extra or {}).get("reasoning_content") for choice in choices)
    for choice in choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), LOOK)
    assert {choice.finish_reason for choice in choices} >= {"stop"}
    body["n"] = 1
    [whole], part = openai.chat.completions.create(**body).choices, streamed(openai, **body)
    assert (part["content"], part["reason"]) == (whole.message.content, whole.finish_reason)
    assert part["thoughts"] == ((whole.message.model_extra or {}).get("reasoning_content") or "")
    assert not streamed(openai, **body, extra_body={"include_reasoning": False})["thoughts"]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "look"}}])
def test_a_call_and_its_result(openai: OpenAI, choice: Any) -> None:
    body: Any = {**BODY, "tools": TOOLS, "tool_choice": choice, "logit_bias": CALLS}
    [whole], part = openai.chat.completions.create(**body).choices, streamed(openai, **body)
    [call] = whole.message.tool_calls or []
    assert call.type == "function"
    assert (whole.message.content, part["content"]) == (None, "")
    assert [[call.function.name, call.function.arguments]] == part["calls"]
    assert whole.finish_reason == part["reason"] == ("stop" if isinstance(choice, dict) else "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), LOOK)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    back: Any = {**BODY, "messages": [*ASK, whole.message, result], "tools": TOOLS, "max_tokens": 5}
    assert openai.chat.completions.create(**back).usage


def test_the_answer_ends_with_a_call_although_no_file_says_so(openai: OpenAI) -> None:
    """The bias makes `<|call|>` the first token."""
    body: Any = {**BODY, "logit_bias": {str(CALL_ID): 100}, "extra_body": {"return_token_ids": True}}
    [choice] = openai.chat.completions.create(**body).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "")
    assert (choice.model_extra or {})["token_ids"] == [CALL_ID]


def test_responses(openai: OpenAI) -> None:
    called: Any = {"model": "oss", "input": ASK, "tools": FLAT, "tool_choice": "required", "temperature": 1}
    called["extra_body"] = {"seed": 3, "logit_bias": CALLS}
    [item] = openai.responses.create(**called).output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), LOOK)
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": LOOK, "strict": True}}
    said: Any = {
        "model": "oss",
        "input": [*ASK, item, result],
        "temperature": 1,
        "text": form,
        "max_output_tokens": 400,
    }
    bias: Any = {"extra_body": {"seed": 2, "logit_bias": THINKS}}
    answer = openai.responses.create(**said, **bias)
    with openai.responses.stream(**said, **bias) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer.output_text
    jsonschema.validate(json.loads(answer.output_text), LOOK)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert "response.reasoning_text.delta" in kinds
    back = openai.responses.create(**{**said, "input": [*said["input"], *answer.output, *ASK]}, **bias)
    assert back.usage is not None


def test_messages(anthropic: Anthropic) -> None:
    asked: Any = {"model": "oss", "max_tokens": 400, "messages": ASK, "tools": [{"name": "look", "input_schema": LOOK}]}
    asked["extra_body"] = {"temperature": 1}
    choice: Any = {"type": "tool", "name": "look"}
    whole = anthropic.messages.create(**asked, tool_choice=choice)
    *thoughts, use = whole.content
    assert use.type == "tool_use"
    assert all(block.type == "thinking" for block in thoughts)
    jsonschema.validate(use.input, LOOK)
    with anthropic.messages.stream(**asked, tool_choice=choice) as stream:
        final = stream.get_final_message().content[-1]
    assert final.type == "tool_use"
    jsonschema.validate(final.input, LOOK)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}]}
    turns: Any = [*ASK, {"role": "assistant", "content": whole.content}, result]
    assert anthropic.messages.create(**{**asked, "messages": turns, "max_tokens": 5}).usage.output_tokens


def test_the_python_api(server: Server) -> None:
    bias = {CHANNEL_ID: 100.0}
    with LLM(engine_address=server.engine_address) as llm:
        wanted = SamplingParams(
            n=4, seed=3, max_tokens=400, logit_bias=bias, structured_outputs=StructuredOutputsParams(choice=["yes"])
        )
        [output] = llm.chat(ASK, wanted, chat_template_kwargs={"reasoning_effort": "low"})
        assert "Reasoning: low" in (output.prompt or "")
        ended = [
            message
            for message, completion in zip(llm.parse(output), output.outputs, strict=True)
            if completion.finish_reason == "stop"
        ]
        assert {message.content for message in ended} == {"yes"}
        forced: Any = {"tools": TOOLS, "tool_choice": "required"}
        calling = SamplingParams(seed=3, max_tokens=400, logit_bias={CHANNEL_ID: -100.0})
        [called] = llm.parse(llm.chat(ASK, calling, **forced)[0], **forced)
        assert [call.name for call in called.tool_calls] == ["look"]


def test_efforts_reach_the_template_or_are_rejected(server: Server, openai: OpenAI) -> None:
    def count(**fields: Any) -> int:
        usage = openai.chat.completions.create(**{**BODY, "max_tokens": 1}, **fields).usage
        assert usage is not None
        return int(usage.prompt_tokens)

    high = server.request("/tokenize", {"messages": ASK, "chat_template_kwargs": {"reasoning_effort": "high"}}).json()
    assert count(reasoning_effort="high") == high["count"]
    assert "high" in server.request("/detokenize", {"tokens": high["tokens"]}).json()["prompt"]
    assert count(reasoning_effort="medium") == count()
    for fields in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"builtin_tools": ["python"]}}},
    ):
        with pytest.raises(BadRequestError, match=r"is not known to this model; it can be low|builtin_tools"):
            count(**fields)
    with pytest.raises(BadRequestError, match="'web_search'"):
        openai.responses.create(model="oss", input=ASK, tools=[{"type": "web_search"}])
