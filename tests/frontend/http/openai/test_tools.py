"""Tool calls and thoughts through OpenAI's client: forced on the demo model, and by models that know tools."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from chat_templates import QWEN_THINKING
from demo_copies import LESS_THAN, LINE_END, THINK, THOUGHT, thinking_model
from http_server import Server
from openai import BadRequestError, OpenAI

from quire.frontend import (
    LLM,
    AssistantMessage,
    AsyncLLM,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    ToolError,
    check_tools,
)
from quire.frontend.text.chat.events import Event, ToolCallArguments

LOOK = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "at": {"type": "integer", "minimum": 0, "maximum": 23}},
    "required": ["city", "at"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"to": {"type": "array", "items": {"type": "null"}, "maxItems": 3}}}
SCHEMAS: dict[str, Any] = {"look": LOOK, "count": COUNT, "stop": {"type": "object", "maxProperties": 0}}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
ASKED: Any = {"model": "quire-demo", "temperature": 1, "seed": 5, "max_tokens": 300}
NAMED: Any = {"type": "function", "function": {"name": "look"}}
PLAIN: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"city": "Rome", "at": 7\}\}\n</tool_call>'


def tools(strict: bool = False, **more: Any) -> Any:
    schemas = {**SCHEMAS, **more}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in schemas.items()
    ]


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model as one that thinks and calls tools like Qwen3."""
    folder = thinking_model(tmp_path_factory.mktemp("models") / "thinker", QWEN_THINKING)
    with Server.start(str(folder), "--served-model-name", "quire-demo") as server:
        yield server


@pytest.fixture(scope="module")
def qwen(thinker: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def streamed(openai: OpenAI, **body: Any) -> list[dict[str, Any]]:
    """Return each answer as a client assembles it from the deltas."""
    found: list[dict[str, Any]] = [
        {"content": "", "thoughts": "", "calls": [], "reason": None} for _ in range(body.get("n", 1))
    ]
    for chunk in openai.chat.completions.create(stream=True, **body):
        for part in chunk.choices:
            one, delta = found[part.index], part.delta
            assert one["reason"] is None
            one["content"] += delta.content or ""
            one["thoughts"] += (delta.model_extra or {}).get("reasoning_content") or ""
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert (call.index, call.type) == (len(one["calls"]), "function")
                    one["calls"].append([call.id, call.function.name, ""])
                else:
                    assert (call.index, call.function.name) == (len(one["calls"]) - 1, None)
                one["calls"][call.index][2] += call.function.arguments or ""
            one["reason"] = part.finish_reason
    return found


@pytest.mark.parametrize("server_kind", ["openai", "qwen"])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_are_valid_whole_and_streamed(
    request: pytest.FixtureRequest, server_kind: str, choice: Any
) -> None:
    """This holds for any model. A call of a named function has the finish reason "stop", as with OpenAI."""
    client: OpenAI = request.getfixturevalue(server_kind)
    body: Any = {**ASKED, "messages": ASK, "tools": tools(), "tool_choice": choice, "n": 3, **PLAIN}
    body["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**body)
    parts = streamed(client, **body)
    ids = set()
    for found, part in zip(whole.choices, parts, strict=True):
        [call], [[part_id, part_name, part_arguments]] = found.message.tool_calls or [], part["calls"]
        assert call.type == "function"
        assert found.message.content is None
        assert part["content"] == part["thoughts"] == ""
        assert (call.function.name, call.function.arguments) == (part_name, part_arguments)
        check(part_name, part_arguments)
        assert found.finish_reason == part["reason"] == ("tool_calls" if choice == "required" else "stop")
        assert choice == "required" or part_name == "look"
        ids |= {call.id, part_id}
    assert len(ids) == 6
    assert all(re.fullmatch("call_[a-zA-Z0-9]{24}", each) for each in ids)


def test_an_answer_may_have_several_calls(openai: OpenAI) -> None:
    body: Any = {
        **ASKED,
        "messages": ASK,
        "tools": tools(),
        "tool_choice": "required",
        "n": 8,
        "logit_bias": {LINE_END: -6},
    }
    answers = [part for part in streamed(openai, **body) if part["reason"] == "tool_calls"]
    assert max(len(part["calls"]) for part in answers) > 1
    for part in answers:
        assert part["content"] == ""
        assert len({call_id for call_id, _, _ in part["calls"]}) == len(part["calls"])
        for _, name, arguments in part["calls"]:
            check(name, arguments)


def test_the_result_of_a_call_can_be_sent_back(qwen: OpenAI) -> None:
    messages = list(ASK)
    body: Any = {**ASKED, "tools": tools(), **PLAIN}
    called = qwen.chat.completions.create(messages=messages, tool_choice=NAMED, **body).choices[0].message
    [call] = called.tool_calls or []
    messages += [called, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    said = qwen.chat.completions.create(messages=messages, tool_choice="none", **{**body, "max_tokens": 5})
    assert said.choices[0].message.content
    assert not said.choices[0].message.tool_calls
    shown = qwen.chat.completions.create(messages=messages, **{**body, "max_tokens": 5})
    assert said.usage is not None
    assert shown.usage is not None
    assert said.usage.prompt_tokens == shown.usage.prompt_tokens  # the tools are in the prompt with "none" as well


def test_tokenize_counts_the_tokens_of_tools(thinker: Server, qwen: OpenAI) -> None:
    answer = qwen.chat.completions.create(messages=ASK, **{**ASKED, "max_tokens": 1}, tools=tools(), **PLAIN)
    assert answer.usage is not None
    counted = thinker.request("/tokenize", {"messages": ASK, "tools": tools(), **PLAIN["extra_body"]}).json()
    assert counted["count"] == answer.usage.prompt_tokens


def test_a_model_may_choose_to_call(qwen: OpenAI) -> None:
    """A regular expression makes it generate a call without any tool constraint."""
    body: Any = {**ASKED, "messages": ASK, "tools": tools()}
    body["extra_body"] = {**PLAIN["extra_body"], "structured_outputs": {"regex": r"Let me look\.\n" + CALL}}
    choice = qwen.chat.completions.create(**body).choices[0]
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"city": "Rome", "at": 7})
    [part] = streamed(qwen, **body)
    assert (part["content"], part["reason"]) == ("Let me look.", "tool_calls")
    assert [each[1:] for each in part["calls"]] == [[call.function.name, call.function.arguments]]
    none = qwen.chat.completions.create(tool_choice="none", **body).choices[0]
    assert not none.message.tool_calls
    assert "<tool_call>" in (none.message.content or "")
    assert none.finish_reason == "stop"


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_is_a_constrained_text_or_a_call(qwen: OpenAI, strict: bool) -> None:
    """The model chooses; the logit bias of the first token decides here."""
    body: Any = {**ASKED, "messages": ASK, "tools": tools(strict), "parallel_tool_calls": False}
    body["extra_body"] = {**PLAIN["extra_body"], "structured_outputs": {"choice": ["yes", "no"]}}
    called, said = (
        qwen.chat.completions.create(**body, logit_bias=bias).choices[0]
        for bias in ({str(LESS_THAN): 100}, {str(LESS_THAN): -100})
    )
    [call] = called.message.tool_calls or []
    assert call.type == "function"
    check(call.function.name, call.function.arguments)
    assert called.finish_reason == "tool_calls"
    assert (said.message.content in ("yes", "no"), said.message.tool_calls) == (True, None)


def test_thoughts_precede_the_constrained_text(qwen: OpenAI) -> None:
    body: Any = {**ASKED, "messages": ASK, "n": 4, "logit_bias": {THINK: 100, THOUGHT: 7}}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": LOOK}}
    whole, parts = qwen.chat.completions.create(**body), streamed(qwen, **body)
    thoughts = [(choice.message.model_extra or {}).get("reasoning_content") or "" for choice in whole.choices]
    assert any(thoughts)
    assert thoughts == [part["thoughts"] for part in parts]
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert 0 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) < whole.usage.completion_tokens
    *_, last = qwen.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body)
    assert last.usage is not None
    assert last.usage.completion_tokens_details == whole.usage.completion_tokens_details
    for choice, part in zip(whole.choices, parts, strict=True):
        assert choice.message.content == part["content"]
        jsonschema.validate(json.loads(part["content"]), LOOK)
        assert choice.finish_reason == part["reason"] == "stop"
    body.pop("response_format")
    forced = streamed(qwen, **body, tools=tools(), tool_choice=NAMED)
    assert any(part["thoughts"] for part in forced)
    for part in forced:
        [[_, name, arguments]] = part["calls"]
        check(name, arguments)
    kept_quiet = streamed(qwen, **{**body, "max_tokens": 30}, extra_body={"include_reasoning": False})
    assert not any(part["thoughts"] for part in kept_quiet)


def test_a_call_may_be_cut_short(openai: OpenAI, server: Server) -> None:
    body: Any = {**ASKED, "messages": ASK, "tools": tools(), "tool_choice": NAMED}
    [part] = streamed(openai, **{**body, "max_tokens": 36})
    [[_, name, arguments]] = part["calls"]
    assert (name, part["reason"]) == ("look", "length")
    assert arguments.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    with openai.chat.completions.create(stream=True, **body) as stream:
        next(iter(stream))  # then disconnect
    server.check_pages()


@pytest.mark.parametrize(("choice", "reason"), [("required", "stop"), (NAMED, "length")])
def test_a_call_that_a_stop_string_cuts_off_is_not_reported_as_whole(openai: OpenAI, choice: Any, reason: str) -> None:
    body: Any = {**ASKED, "messages": ASK, "tools": tools()[:1], "tool_choice": choice, "stop": ["city"]}
    [answer] = openai.chat.completions.create(**body).choices
    [call] = answer.message.tool_calls or []
    assert (call.function.arguments, answer.finish_reason) == ('{"', reason)
    assert (answer.model_extra or {})["stop_reason"] == "city"
    [part] = streamed(openai, **body)
    assert (part["calls"][0][2], part["reason"]) == ('{"', reason)
    [whole] = openai.chat.completions.create(**{**body, "stop": ["</tool_call>"]}).choices
    check("look", (whole.message.tool_calls or [])[0].function.arguments)
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_other_apis_do_not_report_a_cut_call_as_whole_either(server: Server) -> None:
    schema = {"name": "look", "input_schema": LOOK}
    asked: Any = {"max_tokens": 99, "tools": [schema], "tool_choice": {"type": "any"}, "stop_sequences": ["city"]}
    message = server.request("/v1/messages", {**asked, "messages": ASK}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "city")
    function = {"type": "function", "name": "look", "parameters": LOOK}
    asked = {"input": "Rome?", "tools": [function], "tool_choice": "required", "stop": ["city"]}
    response = server.request("/v1/responses", asked).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(each["type"], each["status"]) for each in response["output"]] == [("function_call", "incomplete")]


def test_a_forced_call_that_is_cut_off_leaves_no_text(openai: OpenAI) -> None:
    body: Any = {**ASKED, "messages": ASK, "tools": tools(), "tool_choice": "required", "max_tokens": 3}
    [choice] = openai.chat.completions.create(**body).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (None, None, "length")
    assert streamed(openai, **body) == [{"content": "", "thoughts": "", "calls": [], "reason": "length"}]
    answer = openai.responses.create(
        model="quire-demo",
        input="Rome?",
        tools=[{"type": "function", "name": "look", "parameters": LOOK, "strict": False}],
        tool_choice="required",
        max_output_tokens=3,
    )
    assert (answer.output_text, answer.status) == ("", "incomplete")
    back: Any = [*ASK, choice.message, *ASK]
    assert openai.chat.completions.create(messages=back, **{**ASKED, "max_tokens": 1}).choices


def test_a_model_that_knows_no_tools_continues_after_a_call(server: Server, openai: OpenAI) -> None:
    body: Any = {**ASKED, "tools": tools()}
    called = openai.chat.completions.create(messages=ASK, tool_choice=NAMED, **body).choices[0].message
    [call] = called.tool_calls or []
    messages = [*ASK, called, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    said = openai.chat.completions.create(messages=messages, tool_choice="none", **{**body, "max_tokens": 5})
    assert said.choices[0].message.content
    schema = {"name": "look", "input_schema": LOOK}
    asked: Any = {"model": "quire-demo", "max_tokens": 99, "tools": [schema]}
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        use = client.messages.create(messages=ASK, tool_choice={"type": "tool", "name": "look"}, **asked).content
        [block] = use
        assert block.type == "tool_use"
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "It rains."}]}
        turns: Any = [*ASK, {"role": "assistant", "content": use}, result]
        [text] = client.messages.create(messages=turns, tool_choice={"type": "none"}, **asked).content
    assert text.type == "text"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": tools(), "tool_choice": {**NAMED, "function": {"name": "x"}}}, "tool_choice.function.name", "'x'"),
    ({"tools": tools(), "tool_choice": "x"}, "tool_choice", "'x'"),
    ({"tools": tools() + tools(), "tool_choice": "required"}, "tools[3].function.name", "a second time"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type", "'web_search'"),
    ({"tools": tools(bad={"type": "object", "properties": {"a": {"type": "strin"}}}), "tool_choice": "required"},
     "tools[3].function.parameters", "Invalid type: strin"),
    ({"tools": tools(True, bad={"type": "object", "not": {}}), "tool_choice": "required"},
     "tools[3].function.parameters", "omit strict"),
    ({"tools": tools(big={"type": "object", "properties": {"a": {"const": "x" * 300_000}}}), "tool_choice": "required"},
     "tools", "give fewer tools, or shorter schemas"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_errors_about_bad_tools_name_their_place(
    openai: OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError) as caught:
            openai.chat.completions.create(messages=ASK, model="quire-demo", stream=stream, extra_body=fields)
        assert caught.value.param == param
        assert words in caught.value.message


def test_the_python_api_does_the_same(qwen: OpenAI, thinker: Server) -> None:
    options: Any = {"tools": tools(), "tool_choice": "required", "parallel_tool_calls": False}
    sampled = SamplingParams(n=2, seed=5, max_tokens=300, temperature=1.0)
    body: Any = {**ASKED, "messages": ASK, "n": 2, **options, **PLAIN}
    over_http = [choice.message for choice in qwen.chat.completions.create(**body).choices]
    with LLM(engine_address=thinker.engine_address) as llm:
        [output] = llm.chat(ASK, sampled, chat_template_kwargs={"enable_thinking": False}, **options)
        messages = llm.parse(output, **options)
        assert [message.as_message()["content"] for message in messages] == [None, None]
        for message, other in zip(messages, over_http, strict=True):
            [call], [http_call] = message.tool_calls, other.tool_calls or []
            assert http_call.type == "function"
            assert (call.name, call.arguments) == (http_call.function.name, http_call.function.arguments)
        wanted = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]), logit_bias={THINK: -100.0})
        [said] = llm.chat(ASK, wanted)
        assert llm.parse(said) == [AssistantMessage("yes")]
        bad = {**options, "tools": tools(bad={"type": "object", "properties": {"a": {"type": "strin"}}})}
        with pytest.raises(ToolError, match=r"tools\[3\]\.function\.parameters cannot be enforced: Invalid type"):
            llm.chat(ASK, **bad)
        with pytest.raises(RequestError, match=r"prompt 0: structured_outputs\.grammar .* neither Lark nor GBNF"):
            llm.chat(ASK, SamplingParams(structured_outputs=StructuredOutputsParams(grammar="what is this")))


def test_the_python_api_parses_streams_as_they_arrive(thinker: Server) -> None:
    async def run() -> None:
        async with AsyncLLM(engine_address=thinker.engine_address) as llm:
            params = SamplingParams(seed=7, max_tokens=300, logit_bias={THINK: 100.0, THOUGHT: 7.0})
            events, parser, text = list[Event](), None, ""
            async for output in llm.chat(ASK, params, tools=tools(), tool_choice=NAMED, output_kind="delta"):
                parser = parser or llm.answer_format.parser(output.prompt or "", check_tools(tools(), NAMED))
                events += parser.feed(output.outputs[0].text)
                text += output.outputs[0].text
            assert parser is not None
            events += parser.finish()
            [call] = parser.message.tool_calls
            check(call.name, call.arguments)
            deltas = [event.delta for event in events if isinstance(event, ToolCallArguments)]
            assert "".join(deltas) == call.arguments
            assert parser.message.reasoning_content
            output.outputs[0].text = text
            [whole] = llm.parse(output, tools=tools(), tool_choice=NAMED)
            assert whole.reasoning_content == parser.message.reasoning_content
            bad = tools(bad={"type": "object", "properties": {"a": {"type": "strin"}}})
            with pytest.raises(ToolError, match=r"tools\[3\]\.function\.parameters cannot be enforced"):
                async for _ in llm.chat(ASK, params, tools=bad, tool_choice="required"):
                    pass

    asyncio.run(run())
