"""The harmony format of gpt-oss: parsed in any pieces, enforced, and rendered for the next turn."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from typing import Any

import pytest
from chat_answers import numbered_ids, pieces, read
from chat_templates import GPT_OSS, PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from small_tokenizers import byte_level
from tokenizers import AddedToken

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser, ToolCall, parse_answer
from quire.frontend.text.chat.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.harmony import MARKS, HarmonyParser
from quire.frontend.text.chat.template import ChatTemplate
from quire.frontend.text.chat.tools import ToolUse, check_tools
from quire.protocol.messages import SamplingParams, StructuredOutputs

PROMPT = "<|start|>user<|message|>Look!<|end|><|start|>assistant"
LOOK = {"type": "object", "properties": {"at": {"enum": ["Rome", "Oslo"]}}, "required": ["at"]}
ROME = '{"at": "Rome"}'
THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ROME}"
FINAL = "<|channel|>final<|message|>"
HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}


def tools(choice: Any = "auto", strict: bool = False) -> ToolUse:
    functions = [{"name": "look", "parameters": LOOK, "strict": strict}, {"name": "stop"}]
    use = check_tools([{"type": "function", "function": each} for each in functions], choice)
    assert use is not None
    return use


def parser(prompt: str = PROMPT, names: Collection[str] | None = ("look",), thoughts: bool = True) -> AssistantParser:
    return AssistantParser(None, HarmonyParser(prompt, names, thoughts, numbered_ids()))


def message(text: str, prompt: str = PROMPT) -> AssistantMessage:
    whole, _ = read(parser(prompt), [text])
    for end in range(len(text)):
        assert read(parser(prompt), [text[:end], text[end:]])[0] == whole
    by_char, _ = read(parser(prompt), text)
    assert by_char == whole
    return whole


@pytest.mark.parametrize(
    ("text", "thoughts", "content", "arguments"),
    [
        ("<|channel|>final<|message|>Hi.<|return|>", None, "Hi.", []),
        (f"{THINK}<|channel|>final<|message|>Hi <there> <|no|>.<|return|>", "Hm.", "Hi <there> <|no|>.", []),
        (f"{THINK}{CALL}<|call|>", "Hm.", None, [ROME]),
        (f"{THINK}{CALL}", "Hm.", None, [ROME]),
        (f"{THINK} to=functions.look<|channel|>commentary json<|message|>{ROME}<|call|>", "Hm.", None, [ROME]),
        (f" to=functions.look<|channel|>analysis<|message|>{ROME}<|call|>", None, None, [ROME]),
        (f"<|channel|>analysis to=functions.look code<|message|>{ROME}<|call|>", None, None, [ROME]),
        (f"<|channel|>commentary to=look<|constrain|>json<|message|>{ROME}<|call|>", None, None, [ROME]),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>", None, "I look.", [ROME]),
        ("<|channel|>commentary to=functions.stop<|message|><|call|>", None, None, ["{}"]),
        (f"{CALL}<|end|><|start|>assistant{CALL}<|call|>", None, None, [ROME, ROME]),
        (f"{CALL}<|call|>\n", None, None, [ROME]),
        ('<|channel|>commentary to=functions.look<|message|>{"at": "R', None, None, ['{"at": "R']),
        (f"{THINK}{THINK}<|channel|>final<|message|>Hi.", "Hm.\nHm.", "Hi.", []),
        ("<|channel|>analysis to=python code<|message|>print()<|call|>", "print()", "", []),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", "{}", "", []),
        ("<|channel|>commentary to=assistant<|message|>Hi.<|end|>", None, "Hi.", []),
        ("<|message|>Hi.<|end|>", None, "Hi.", []),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", None, "{}", []),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.", "Hm.", "Hi.", []),
        ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi.", "Hm.", "Hi.", []),
        ("<|channel|>analysis<|message|>cut o", "cut o", "", []),
        ("<|channel|>analysis<|message|>cut <|en", "cut <|en", "", []),
        ("<|channel|>ana", None, "", []),
        (" to=functions.lo", None, "", []),
        ("to be", None, "to be", []),
        ("Hello <|message|> all", None, "Hello <|message|> all", []),
        ("\n  Hi.", None, "\n  Hi.", []),
        ("  ", None, "  ", []),
        ("<|channel|>fi\nnal<|message|>", None, "<|channel|>fi\nnal<|message|>", []),
        ("", None, "", []),
    ],
)  # fmt: skip
def test_an_answer(text: str, thoughts: str | None, content: str | None, arguments: list[str]) -> None:
    found = message(text)
    assert (found.reasoning_content, found.content) == (thoughts, content)
    assert [call.arguments for call in found.tool_calls] == arguments


def test_it_streams() -> None:
    reader = HarmonyParser(PROMPT, {"look"}, new_id=numbered_ids())
    assert reader.feed("<|channel|>analysis<|message|>I thi") == [ReasoningDelta("I thi")]
    assert reader.feed("nk<|e") == [ReasoningDelta("nk")]
    assert reader.feed("nd|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json") == []
    assert reader.feed('<|message|>{"at') == [ToolCallStart(0, "call_0", "look"), ToolCallArguments(0, '{"at')]
    assert reader.feed('": "Rome"}<|call|>') == [ToolCallArguments(0, '": "Rome"}')]
    assert reader.feed("<|start|>assistant<|channel|>final<|message|>Hi") == [ContentDelta("Hi")]
    assert reader.finish() == []


def test_the_answer_goes_on_where_the_prompt_ends() -> None:
    assert message(" is.", f"{PROMPT}<|channel|>final<|message|>That") == AssistantMessage(" is.")
    thinking = f"{PROMPT}<|channel|>analysis<|message|>"
    assert message("Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi", thinking) == AssistantMessage(
        "Hi", "Hm."
    )
    assert message("<|message|>Hm.", f"{PROMPT}<|channel|>analysis") == AssistantMessage("", "Hm.")


def test_calls_and_thoughts_that_nobody_reads() -> None:
    text = f"{THINK}{CALL}<|call|>"
    assert read(parser(names=None), [text])[0] == AssistantMessage("", f"Hm.\n{ROME}")
    without = read(parser(thoughts=False), [text])[0]
    assert without == AssistantMessage("Hm.", None, (ToolCall("call_0", "look", ROME),))


parts = st.sampled_from(
    [
        *(*sorted(MARKS), "assistant", "analysis", "final", "commentary", " to=functions.look", "to=", "\n", " ", "<|"),
        *("words", '{"a": 1}', "x" * 99, FINAL, "<|channel|>commentary to=functions.look<|message|>"),
    ]
)


@settings(max_examples=200)
@given(
    data=st.data(),
    prompt=st.sampled_from([PROMPT, PROMPT + FINAL, ""]),
    text=st.lists(parts, max_size=12).map("".join),
)
def test_the_result_does_not_depend_on_the_pieces(data: st.DataObject, prompt: str, text: str) -> None:
    whole, _ = read(parser(prompt), [text])
    cut, _ = read(parser(prompt), data.draw(pieces(text)))
    assert cut == whole


def test_the_format_is_detected() -> None:
    form = AnswerFormat.detect(GPT_OSS, special_tokens={"<|channel|>": 1})
    assert form == AnswerFormat("openai", "openai_gptoss", {"<|channel|>": 1})
    assert form.is_harmony
    assert form.reads_special_tokens
    assert AnswerFormat.detect(PLAIN, tool_parser="openai") == AnswerFormat("openai", "openai_gptoss")
    assert AnswerFormat.detect(PLAIN, reasoning_parser="openai_gptoss") == AnswerFormat("openai", "openai_gptoss")
    assert AnswerFormat.detect(GPT_OSS, tool_parser="none") == AnswerFormat(None, "openai_gptoss")
    assert AnswerFormat.detect(GPT_OSS, tool_parser="none", reasoning_parser="none") == AnswerFormat()
    assert AnswerFormat.detect(GPT_OSS, tool_parser="hermes") == AnswerFormat("hermes")
    with pytest.raises(ValueError, match="tool_parser='hermes' and reasoning_parser='openai_gptoss' don't go together"):
        AnswerFormat.detect(PLAIN, tool_parser="hermes", reasoning_parser="openai_gptoss")
    with pytest.raises(ValueError, match=r"'x' is not known; give one of none, apertus, cohere2, .*openai_gptoss"):
        AnswerFormat.detect(PLAIN, reasoning_parser="x")


@functools.cache
def special() -> tuple[LLTokenizer, dict[str, int]]:
    """Return a tokenizer that has the marks as special tokens, with their ids."""
    backend = byte_level()
    marks = sorted(MARKS | {"<|eos|>"})
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    ids = {mark: backend.get_vocab()[mark] for mark in marks}
    return LLTokenizer(backend.to_str(), eos_token=ids["<|eos|>"]), ids


def allows(text: str, use: ToolUse | None, is_special: bool, prompt: str = PROMPT, **structured: Any) -> bool:
    """Return True if the constraint on the answer accepts `text` as a complete one."""
    tokenizer, ids = special() if is_special else (LLTokenizer("byte"), {})
    constraint = StructuredOutputs(**structured) if structured else None
    params = AnswerFormat("openai", "openai_gptoss", ids).params(
        SamplingParams(structured_outputs=constraint), prompt, use
    )
    assert params.structured_outputs is not None
    assert params.structured_outputs.grammar is not None
    grammar = LLMatcher.grammar_from_lark(params.structured_outputs.grammar)
    error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    assert not error, messages
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def calls(arguments: str = ROME, name: str = "look") -> list[str]:
    to = f" to=functions.{name}"
    heads = [
        f"<|channel|>commentary{to} <|constrain|>json", f"<|channel|>commentary{to}<|constrain|>json",
        f"<|channel|>analysis{to}", f"{to}<|channel|>commentary json", f"{to}<|channel|>commentary <|constrain|>json",
    ]  # fmt: skip
    return [f"{head}<|message|>{arguments}" for head in heads]


@pytest.mark.parametrize("is_special", [False, True])
def test_a_forced_call_is_one_that_the_parser_reads(is_special: bool) -> None:
    use = tools("required")
    form = AnswerFormat("openai", "openai_gptoss")
    for text in [*calls(), *(THINK + call for call in calls()), THINK + THINK + CALL, *calls("{}", "stop")]:
        assert allows(text, use, is_special)
        found = parse_answer(text, form.parser(PROMPT, use))
        assert found.content is None
        assert len(found.tool_calls) == 1
    wrong = [*calls('{"at": "Bonn"}'), *calls("{}"), *calls(ROME, "up"), f"{FINAL}Hi", f"{THINK}{FINAL}Hi", THINK, ROME]
    wrong += ["", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}", f"{CALL}<|end|>"]
    assert not any(allows(text, use, is_special) for text in wrong)
    named = tools({"type": "function", "function": {"name": "stop"}})
    assert [allows(text, named, is_special) for text in (calls("{}", "stop")[0], calls()[0])] == [True, False]


@pytest.mark.parametrize("is_special", [False, True])
def test_a_constraint_applies_to_the_final_channel(is_special: bool) -> None:
    for text in (f"{FINAL}[1]", f"{THINK}{FINAL}[1]", "<|channel|>final <|constrain|>json<|message|>[1]"):
        assert allows(text, None, is_special, json={"const": [1]})
    for text in ("[1]", f"{FINAL}[2]", f"{THINK}[1]", f"<|channel|>commentary<|message|>x<|end|>{FINAL}[1]", THINK):
        assert not allows(text, None, is_special, json={"const": [1]})
    use = tools()
    assert [
        allows(text, use, is_special, choice=["yes"]) for text in (f"{FINAL}yes", f"{THINK}{CALL}", f"{FINAL}no")
    ] == [
        True,
        True,
        False,
    ]
    thinking = f"{PROMPT}<|channel|>analysis<|message|>"
    assert allows(f"Hm.<|end|><|start|>assistant{FINAL}yes", None, is_special, thinking, choice=["yes"])


@pytest.mark.parametrize("is_special", [False, True])
def test_strict_tools_leave_the_rest_free(is_special: bool) -> None:
    use = tools(strict=True)
    remark = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for text in (FINAL, f"{FINAL}Hi <there>", f"{THINK}{remark}{CALL}", f"{remark}{FINAL}Hi", CALL):
        assert allows(text, use, is_special)
    for text in (*calls("{}"), f"{FINAL}Hi<|end|><|start|>assistant{calls('{}')[0]}", "Hi"):
        assert not allows(text, use, is_special)


def test_a_constraint_on_the_rest_of_a_final_message_is_sent_unchanged() -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes"]))
    form = AnswerFormat("openai", "openai_gptoss")
    assert form.params(asked, f"{PROMPT}<|channel|>final<|message|>I say ") == asked
    assert allows(
        f"<|end|><|start|>assistant{CALL}", tools("required"), False, f"{PROMPT}<|channel|>final<|message|>So"
    )


def call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ROME}}


def rendered(*messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(GPT_OSS).render([HELLO, *messages], **options).partition("Hello<|end|>")[2]


def test_thoughts_are_kept_until_the_answer() -> None:
    called = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call("look", "a")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "Sunny."}
    calling = f"<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{ROME}<|call|>"
    returned = '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"Sunny."<|end|>'
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    assert rendered(called, result) == f"{thought}{calling}{returned}<|start|>assistant"
    said = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "So."}
    answer = "<|start|>assistant<|channel|>final<|message|>It is sunny.<|end|>"
    assert rendered(called, result, said, HELLO).startswith(f"{calling}{returned}{answer}")
    both = rendered({**called, "content": "I look."}, result)
    assert both.startswith("<|start|>assistant<|channel|>analysis<|message|>Hm.\nI look.<|end|>")
    continued = rendered(said, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|start|>assistant<|channel|>final<|message|>It is sunny.")


def test_each_of_several_calls_is_followed_by_its_result() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [call("look", "a"), call("stop", "b")]}
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("b", "x", "a")]
    parts = rendered(called, *results).split("<|start|>")[1:]
    heads = [
        (part.partition("<|")[0], json.loads(part.partition("<|message|>")[2].partition("<|")[0]))
        for part in parts[:-1]
    ]
    arguments = json.loads(ROME)
    assert heads == [
        ("assistant to=functions.look", arguments),
        ("functions.look to=assistant", "of a"),
        ("assistant to=functions.stop", arguments),
        ("functions.stop to=assistant", "of b"),
        ("functions.stop to=assistant", "of x"),
    ]


def test_the_next_turn_has_the_call_as_the_model_wrote_it() -> None:
    prompt = ChatTemplate(GPT_OSS).render([HELLO], tools=tools().for_template())
    answer = f" to=functions.look<|channel|>commentary json<|message|>{ROME}<|call|>"
    found = parse_answer(answer, AnswerFormat.detect(GPT_OSS).parser(prompt, tools()))
    result = {"role": "tool", "tool_call_id": found.tool_calls[0].id, "content": "Sunny."}
    following = ChatTemplate(GPT_OSS).render([HELLO, found.as_message(), result], tools=tools().for_template())
    assert following.startswith(prompt + answer)


def test_efforts_and_builtin_tools() -> None:
    template = ChatTemplate(GPT_OSS)
    assert "Reasoning: medium" in template.render([HELLO])
    assert "Reasoning: high" in template.render([HELLO], reasoning_effort="high")
    with pytest.raises(
        ChatTemplateError, match="reasoning_effort='none' is not known to this model; it can be low, medium"
    ):
        template.render([HELLO], reasoning_effort="none")
    with pytest.raises(ChatTemplateError, match=r"builtin_tools=\['python'\] is not supported"):
        template.render([HELLO], builtin_tools=["python"])
    assert ChatTemplate(PLAIN).render([HELLO], reasoning_effort="none")
