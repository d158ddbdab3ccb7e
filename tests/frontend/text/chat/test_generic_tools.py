"""Tools of models whose chat template shows none: described in the prompt, enforced, read from the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_answers import numbered_ids
from chat_templates import LLAMA, PLAIN, SMOLLM3
from llguidance import LLMatcher, LLTokenizer

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import parse_answer
from quire.frontend.text.chat.generic_tools import described
from quire.frontend.text.chat.template import ChatTemplate
from quire.frontend.text.chat.tools import ToolUse, check_tools
from quire.protocol.messages import SamplingParams, StructuredOutputs

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
DROPS_SYSTEM = (
    "{% for message in messages if message.role != 'system' %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
UNKNOWN = "{% if tools %}TOOLS <arg_key> {{ tools }}{% endif %}" + CHATML + "{# message.tool_calls #}"
HELLO: Any = {"role": "user", "content": "Hello"}
LOOK = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Looks, é.", "parameters": LOOK}},
    {"type": "function", "function": {"name": "stop"}},
]
ROME = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


def use(choice: Any = None, **options: Any) -> ToolUse:
    made = check_tools(TOOLS, choice, **options)
    assert made is not None
    return made


def render(source: str, *messages: Any, tools: Any = TOOLS) -> str:
    return ChatTemplate(source, {"bos_token": ""}).render(messages, tools=tools, describe_tools=True)


def allows(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    tokenizer = LLTokenizer("byte")
    driven = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    tokens = tokenizer.tokenize_str(text)
    return driven.try_consume_tokens(tokens) == len(tokens) and driven.is_accepting()


def test_tools_join_the_systems_message() -> None:
    text = described(TOOLS)
    assert '{"name": "look", "description": "Looks, é.", "parameters": {"type": "object"' in text
    assert render(PLAIN, HELLO) == f"system: {text}\nuser: Hello\nassistant: "
    brief = {"role": "system", "content": "Be brief."}
    assert render(PLAIN, brief, HELLO) == f"system: Be brief.\n\n{text}\nuser: Hello\nassistant: "
    assert render(PLAIN, HELLO, tools=None) == "user: Hello\nassistant: "


@pytest.mark.parametrize("source", [NO_SYSTEM, DROPS_SYSTEM])
def test_tools_join_the_users_first_message_if_the_template_has_no_system(source: str) -> None:
    assert f"user: {described(TOOLS)}\n\nHello\n" in render(source, HELLO, HELLO)
    assert render(source, HELLO, HELLO).count("<tool_call>") == 1


def test_tools_that_no_place_can_hold_are_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="can't be told its tools"):
        render("{{ messages | length }}", HELLO)
    with pytest.raises(ChatTemplateError, match="no system"):
        render(NO_SYSTEM, {"role": "system", "content": "Be brief."}, HELLO)


def test_a_format_that_is_not_known_is_not_shown() -> None:
    """The model could answer in it, and its calls could not be read."""
    assert AnswerFormat.detect(UNKNOWN) == AnswerFormat("generic")
    assert "TOOLS" not in render(UNKNOWN, HELLO)
    assert described(TOOLS) in render(UNKNOWN, HELLO)
    assert not AnswerFormat.detect(LLAMA).describes_tools
    assert described(TOOLS) in render(SMOLLM3, HELLO)  # named by --tool-call-parser


@pytest.mark.parametrize("source", [CHATML, UNKNOWN])
def test_the_next_turn_has_the_answer_as_the_model_wrote_it(source: str) -> None:
    """The prompt of the next turn begins with the last one and its answer, whose pages are cached."""
    prompt = render(source, HELLO)
    answer = f"I look.\n{ROME}\n{STOP}"
    found = parse_answer(answer, AnswerFormat.detect(source).parser(prompt, use(), numbered_ids()))
    assert [call.name for call in found.tool_calls] == ["look", "stop"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in found.tool_calls]
    expected = f"{prompt}{answer}<|im_end|>\n<|im_start|>user\nResult of look: seen\nResult of stop: seen"
    assert render(source, HELLO, found.as_message(), *results).startswith(f"{expected}<|im_end|>\n")
    joined = render(source, HELLO, found.as_message(), *results, {"role": "user", "content": "Go on"})
    assert joined.startswith(f"{expected}\n\nGo on<|im_end|>\n")


def test_results_of_parallel_calls_can_be_told_apart() -> None:
    def call(name: str, number: int) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": f'{{"n": {number}}}'}}

    def result(call_id: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}

    calls = {"role": "assistant", "content": None, "tool_calls": [call("look", 1), call("stop", 2), call("look", 3)]}
    expected = "Result of look (call 1): of c1\nResult of stop: of c2\nResult of look (call 3): of c3"
    for order in (["c1", "c2", "c3"], ["c3", "c1", "c2"], ["c2", "c3", "c1"]):
        assert expected in render(CHATML, HELLO, calls, *map(result, order))
    assert "user\nResult of look (call 3): of c3<" in render(CHATML, HELLO, calls, result("c3"))
    assert "Result of look (call 1): of c1\nResult of the call: of x" in render(
        CHATML, HELLO, calls, result("x"), result("c1")
    )


def test_an_answer_is_text_or_calls_that_follow_the_schemas() -> None:
    grammar = AnswerFormat("generic").grammar("", use())
    for text in ("", "Hello <b>\n{}", ROME, f"I look.\n{ROME}\n{STOP}", f"{STOP}\n{STOP}"):
        assert allows(grammar, text)
    wrong = [ROME.replace("Rome", "Bonn"), ROME.replace("look", "find"), "<tool_call>", f"{ROME} and", ROME[:-5]]
    assert not any(allows(grammar, text) for text in wrong)
    assert not allows(AnswerFormat("generic").grammar("", use(parallel_tool_calls=False)), f"{ROME}\n{STOP}")
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[1]]}}
    assert not allows(AnswerFormat("generic").grammar("", use(only)), ROME)


def test_a_forced_answer_is_calls() -> None:
    grammar = AnswerFormat("generic").grammar("", use("required"))
    assert allows(grammar, ROME)
    assert allows(grammar, STOP)
    assert not allows(grammar, f"I look.\n{ROME}")
    named = AnswerFormat("generic").grammar("", use({"type": "function", "function": {"name": "stop"}}))
    assert (allows(named, STOP), allows(named, ROME), allows(named, f"{STOP}\n{STOP}")) == (True, False, False)


def test_tools_constrain_no_answer_that_may_not_call() -> None:
    form = AnswerFormat("generic")
    assert form.grammar("", use("none")) is None
    assert form.params(SamplingParams(), "", use("none")).structured_outputs is None
    yes = StructuredOutputs(choice=["yes"])
    assert form.params(SamplingParams(structured_outputs=yes), "", use("none")).structured_outputs == yes
    both = form.params(SamplingParams(structured_outputs=yes), "", use()).structured_outputs
    assert both is not None
    assert [allows(both.grammar, text) for text in ("yes", ROME, "no")] == [True, True, False]


def test_a_call_streams_as_it_is_written() -> None:
    parser = AnswerFormat("generic").parser("", use(), numbered_ids())
    events = [each for char in f"I look.\n{ROME}" for each in parser.feed(char)]
    assert len(events) > 20
    events += parser.finish()
    [call] = parser.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("look", {"city": "Rome"})
    assert (parser.message.content, parser.finish_reason("stop")) == ("I look.", "tool_calls")


def test_the_start_of_a_call_that_is_cut_off_is_not_text() -> None:
    found = parse_answer(f"I look.\n{ROME}\n<tool_call>\n{{", AnswerFormat("generic").parser("", use()))
    assert (found.content, len(found.tool_calls)) == ("I look.", 1)
