from __future__ import annotations

from typing import Any

import pytest
from chat_answers import garbage, numbered_ids, pieces, read
from chat_templates import LLAMA, PLAIN, QWEN, QWEN_THINKING
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser, ToolCall, parse_answer
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.reasoning import AnswerStart, ReasoningParser
from quire.frontend.text.chat.template import ChatTemplate
from quire.frontend.text.chat.tool_parsers import TOOL_PARSERS
from quire.frontend.text.chat.tools import ToolError, check_tools

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "go")]
PROMPT = "<|im_start|>assistant\n"
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
)


def assistant(name: str = "hermes", start: AnswerStart = AnswerStart.EITHER, parallel: bool = True) -> AssistantParser:
    return AssistantParser(TOOL_PARSERS[name](None, numbered_ids()), ReasoningParser(start), parallel)


def test_thoughts_content_and_calls() -> None:
    found, events = read(assistant(), [f"<think>\nI look, <tool_call>?\n</think>\n\nI look.\n{CALLS}\n"])
    calls = (ToolCall("call_0", "look", '{"at": "it"}'), ToolCall("call_1", "go", "{}"))
    assert found == AssistantMessage("I look.", "I look, <tool_call>?", calls)
    assert events == [
        ReasoningDelta("I look, <tool_call>?"),
        ContentDelta("I look."),
        ToolCallStart(0, "call_0", "look"),
        ToolCallArguments(0, '{"at": "it"}'),
        ToolCallStart(1, "call_1", "go"),
        ToolCallArguments(1, "{}"),
    ]


@settings(max_examples=50)
@given(data=st.data(), text=garbage, name=st.sampled_from(sorted(TOOL_PARSERS)), start=st.sampled_from(AnswerStart))
def test_the_result_does_not_depend_on_the_pieces(
    data: st.DataObject, text: str, name: str, start: AnswerStart
) -> None:
    whole, _ = read(assistant(name, start), [text])
    cut, _ = read(assistant(name, start), data.draw(pieces(text)))
    assert cut == whole


def test_one_call_without_parallel_calls() -> None:
    found, _ = read(assistant(parallel=False), [CALLS])
    assert [call.name for call in found.tool_calls] == ["look"]


def test_finish_reasons() -> None:
    caller, talker = assistant(), assistant()
    parse_answer(CALLS, caller)
    parse_answer("Hello", talker)
    assert [caller.finish_reason(reason) for reason in ("stop", "length", "abort", None)] == [
        *("tool_calls", "length", "abort", None)
    ]
    assert talker.finish_reason("stop") == "stop"


@pytest.mark.parametrize(
    ("arguments", "is_whole"),
    [("", False), ('{"', False), ('{"a": [1', False), ("[]", False), ("{}", True), ('{"a": 1}', True)],
)
def test_a_call_that_a_stop_string_cuts_off_is_not_whole(arguments: str, is_whole: bool) -> None:
    class Splitter:
        def feed(self, delta: str) -> list[Event]:
            del delta
            return [ToolCallStart(0, "id", "look"), ToolCallArguments(0, arguments)]

        def finish(self) -> list[Event]:
            return []

    parser = AssistantParser(splitter=Splitter())
    parser.feed("")
    for stop in ("city", 7):
        assert parser.finish_reason("stop", stop) == ("tool_calls" if is_whole else "stop")
        assert parser.cuts_call("stop", stop) is not is_whole
    assert parser.finish_reason("stop") == "tool_calls"  # the model wrote it so
    assert not parser.cuts_call("stop")
    assert not parser.cuts_call(None)
    for reason in ("length", "timeout", "abort"):
        assert parser.finish_reason(reason) == reason
        assert parser.cuts_call(reason) is not is_whole


def test_everything_is_content_without_parsers() -> None:
    text = f"<think>x</think>{CALLS}"
    assert parse_answer(text, AssistantParser()) == AssistantMessage(text)
    assert parse_answer("", AssistantParser()) == AssistantMessage("")


@pytest.mark.parametrize("source", [QWEN, QWEN_THINKING])
def test_the_next_turn_has_the_answer_as_the_model_wrote_it(source: str) -> None:
    """The prompt of the next turn begins with the last one and its answer, whose pages are cached."""
    template = ChatTemplate(source)
    use = check_tools(TOOLS)
    assert use is not None
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look!"}]
    prompt = template.render(messages, tools=use.for_template())
    answer = f"I look.\n{CALLS}"
    found = parse_answer(answer, AnswerFormat.detect(source).parser(prompt, use))
    replies = [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in found.tool_calls]
    following = template.render([*messages, found.as_message(), *replies], tools=use.for_template())
    assert following.startswith(prompt + answer + "<|im_end|>\n")


def test_the_format_of_a_model() -> None:
    assert AnswerFormat.detect(QWEN_THINKING) == AnswerFormat("hermes", "qwen3")
    assert AnswerFormat.detect(LLAMA, special_tokens={"<s>": 1}) == AnswerFormat("llama3_json", None, {"<s>": 1})
    assert AnswerFormat.detect(QWEN_THINKING, tool_parser="none", reasoning_parser="none") == AnswerFormat()
    assert AnswerFormat.detect(PLAIN) == AnswerFormat("generic")
    assert AnswerFormat.detect(PLAIN, tool_parser="hermes", reasoning_parser="think") == AnswerFormat("hermes", "think")
    with pytest.raises(
        ValueError,
        match="tool_parser='x' is not known; give one of none, apertus, cohere2, deepseek_v3, deepseek_v31, gemma4",
    ):
        AnswerFormat.detect(PLAIN, tool_parser="x")
    with pytest.raises(
        ValueError, match="reasoning_parser='x' is not known; give one of none, apertus, cohere2, deepseek_r1"
    ):
        AnswerFormat.detect(PLAIN, reasoning_parser="x")


def test_special_tokens_are_kept_if_they_are_marks() -> None:
    tags = {"<tool_call>": 1, "<|python_tag|>": 2}
    formats = [
        AnswerFormat("hermes", None, tags),
        AnswerFormat("hermes", "think"),
        AnswerFormat(None, "think", {"</think>": 1}),
        AnswerFormat("llama3_json", None, tags),
        AnswerFormat(None, None, tags),
    ]
    assert [form.reads_special_tokens for form in formats] == [True, False, True, False, False]


def test_without_a_parser_calls_can_be_forced_but_not_chosen() -> None:
    auto, forced, never = (check_tools(TOOLS, choice) for choice in ("auto", "required", "none"))
    with pytest.raises(ToolError, match="tool_choice is 'auto', but tool_call_parser='none'"):
        AnswerFormat().parser(PROMPT, auto)
    with pytest.raises(ToolError, match="tool_choice is 'auto', but tool_call_parser='none'"):
        AnswerFormat().grammar(PROMPT, auto)
    text = '[{"name": "go", "arguments": {}}]'
    assert parse_answer(text, AnswerFormat().parser(PROMPT, forced)).tool_calls[0].name == "go"
    assert AnswerFormat().grammar(PROMPT, forced)
    assert parse_answer(text, AnswerFormat().parser(PROMPT, never)) == AssistantMessage(text)
    assert AnswerFormat("hermes").grammar(PROMPT, never) is None
    assert AnswerFormat("hermes").grammar(PROMPT, auto) is None
    assert AnswerFormat("hermes").grammar(PROMPT, None) is None


def test_only_the_tools_of_the_choice_are_bare_calls() -> None:
    go = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "go"}}]}
    chosen = check_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": go})
    text = '{"name": "look", "parameters": {}}'
    assert parse_answer(text, AnswerFormat("llama3_json").parser(PROMPT, chosen)) == AssistantMessage(text)


@pytest.mark.parametrize("own", ["hermes", "llama3_json", None])
def test_a_forced_call_that_is_cut_off_has_no_content(own: str | None) -> None:
    tools = check_tools([{"type": "function", "function": {"name": "f"}}], "required")
    key, before, between = {
        "hermes": ("arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n"),
        "llama3_json": ("parameters", "", "; "),
        None: ("arguments", "[", ", "),
    }[own]
    call = f'{{"name": "f", "{key}": {{}}}}'
    text = before + call + between + call
    for end in range(len(text)):
        reader = AnswerFormat(own).parser("", tools)
        events = [event for piece in text[:end] for event in reader.feed(piece)] + reader.finish()
        assert not any(isinstance(event, ContentDelta) for event in events)
        assert reader.message.content is None
        assert reader.finish_reason("length") == "length"
