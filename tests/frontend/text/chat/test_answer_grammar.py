"""Grammars of answers with thoughts, tool calls and constrained content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from json_schemas import SCHEMAS
from llguidance import LLMatcher, LLTokenizer

from quire.engine_core.grammar.text import grammar_source
from quire.frontend import RequestError, SamplingParams, check_tools
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.answer_grammar import answer_rule
from quire.protocol.messages import StructuredOutputs

TOKENIZER = LLTokenizer("byte")
OPEN = "assistant\n<think>\n"
CLOSED = "assistant\n<think>\n\n</think>\n\n"
TOOLS = check_tools([{"type": "function", "function": {"name": "stop"}}])
CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
FORM = AnswerFormat("hermes", "qwen3")


def allows(lark: str, text: str) -> bool:
    """Return True if the grammar accepts `text` as a complete answer."""
    grammar = LLMatcher.grammar_from_lark(lark)
    error, messages = LLMatcher.validate_grammar_with_warnings(grammar, TOKENIZER)
    assert not error, messages
    matcher = LLMatcher(TOKENIZER, grammar)
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"regex": r"a/b\/[/]\n" + "\n"}, "a/b//\n\n", "a/b"),
        ({"choice": ["yes", 'ja, "so" \\ n\u00ebe\n']}, 'ja, "so" \\ n\u00ebe\n', "no"),
        ({"grammar": 'start: "a" answer\nanswer: /b{2}/ "}"'}, "abb}", "ab}"),
        ({"grammar": 'root ::= "a" rest # or not }\nrest ::= [0-9]{2}'}, "a12", "a1"),
        ({"json_object": True}, '{"a" : [1]}', "[1]"),
        ({"json": {"const": [1, 2]}}, "[1,\n  2]", "[2]"),
        ({"json": '{"const": {"}": "%json {"}}'}, '{"}": "%json {"}', "{}"),
        ({"json": {"const": [1, 2]}, "disable_any_whitespace": True}, "[1,2]", "[1, 2]"),
        ({"json": {"const": [1, 2]}, "whitespace_pattern": "_?"}, "[1,_2_]", "[1, 2]"),
    ],
)
def test_each_kind_is_a_part_of_a_grammar(fields: dict[str, Any], right: str, wrong: str) -> None:
    rule = answer_rule(StructuredOutputs(**fields))
    assert allows(f"start: answer\nanswer: {rule}\n", right)
    assert not allows(f"start: answer\nanswer: {rule}\n", wrong)


def test_blanks_in_json_are_where_the_engine_allows_them() -> None:
    structured = StructuredOutputs(json={"type": "object"})
    alone = json.loads(grammar_source(structured)[1])["grammars"][0]["json_schema"]["x-guidance"]
    within = json.loads(answer_rule(structured).removeprefix("%json "))["x-guidance"]
    assert {key: alone[key] for key in within} == within


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_a_part_of_a_grammar(name: str) -> None:
    own = {**SCHEMAS[name], "x-guidance": {"lenient": True}}  # enforced
    rule = answer_rule(StructuredOutputs(json=own))
    assert '"lenient": false' in rule
    grammar = LLMatcher.grammar_from_lark(f"start: words\nwords: {rule}\n")
    assert LLMatcher.validate_grammar(grammar, TOKENIZER) == ""


def constrained(prompt: str, tools: Any = TOOLS, **fields: Any) -> str:
    params = SamplingParams(structured_outputs=StructuredOutputs(**fields))
    structured = FORM.params(params, prompt, tools).structured_outputs
    assert structured is not None
    assert structured.grammar is not None
    return structured.grammar


def test_constrained_content_or_a_call() -> None:
    lark = constrained(CLOSED, choice=["yes", "no"])
    assert all(allows(lark, text) for text in ("yes", CALL, f"{CALL}\n{CALL}"))
    assert not any(allows(lark, text) for text in ("", "words", f"yes{CALL}", "<tool_call>yes"))
    thinking = constrained(OPEN, regex="y+")
    assert all(allows(thinking, f"Hm.\n</think>\n\n{text}") for text in ("y", CALL))
    assert not allows(thinking, "y")


def test_a_forced_call_has_no_content() -> None:
    forced = check_tools([{"type": "function", "function": {"name": "stop"}}], "required")
    lark = constrained(CLOSED, forced, choice=["yes"])
    assert allows(lark, CALL)
    assert not allows(lark, "yes")


def test_a_constraint_without_thoughts_or_calls_is_sent_unchanged() -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "null"}))
    shown_only = check_tools([{"type": "function", "function": {"name": "stop"}}], "none")
    assert FORM.params(asked, CLOSED) == asked
    assert FORM.params(asked, CLOSED, shown_only) == asked
    assert AnswerFormat().params(asked, "assistant\n") == asked
    assert FORM.params(SamplingParams(), OPEN, TOOLS) == SamplingParams()


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    form = AnswerFormat("hermes", "think", {"<think>": 1, "</think>": 2})
    assert not form.params(SamplingParams(), OPEN).skip_special_tokens


def test_an_invalid_grammar() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.grammar can't be used: it is neither Lark nor GBNF"):
        constrained(OPEN, grammar="what is this")


@pytest.mark.parametrize("num_rules", [1, 401])
def test_gbnf_that_takes_long_to_translate_is_rejected(num_rules: int) -> None:
    rules = "".join(f'r{number} ::= "{"x" * (9000 if num_rules == 1 else 1)}"\n' for number in range(num_rules))
    with pytest.raises(RequestError, match=r"beside thoughts or tools GBNF may have 8192 characters and 400 rules"):
        answer_rule(StructuredOutputs(grammar=rules))
