"""What grammars force is taken at once, and a text too long for that, or without end, is an error of its request."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from json_schemas import Schema, closed, closed_object, text, whole
from paged_executor import allowed_tokens
from random_grammars import random_grammar

from quire.engine_core.grammar.matching import compile_matcher
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.frontend import SamplingParams, check_tools
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.call_formats import FORMATS
from quire.kernels.runner import Constraint, Matcher
from quire.protocol.messages import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

EOS = 4
LONG = "the quick brown fox " * 300
TOO_LONG = "the only text that may come next is too long, or has no end|Too many items"


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> GrammarTokenizer:
    return GrammarTokenizer(str(demo_model))


@pytest.fixture(scope="module")
def native(demo_model: Path) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer((demo_model / "tokenizer.json").read_text(encoding="utf-8"))


def lark(*rules: str) -> StructuredOutputs:
    return StructuredOutputs(grammar="\n".join(rules))


def doubled(times: int, part: str) -> tuple[str, ...]:
    """Return rules of which `r0` is 2 ** times parts."""
    return (*(f"r{i}: r{i + 1} r{i + 1}" for i in range(times)), f"r{times}: {part}")


def constraint_of(matcher: Matcher, tokenizer: GrammarTokenizer) -> Constraint:
    return Constraint(matcher, tokenizer.get().num_tokens, [EOS])


def next_tokens(constraint: Constraint) -> list[int]:
    """Return the tokens that may come next, none at a dead end."""
    if constraint.begin_mask():
        constraint.write_mask()
    if constraint.error is not None:
        return []
    return [token for token in allowed_tokens(constraint.mask) if token != EOS]


NOTHING = r"/[^\s\S]/"
ENDLESS = [
    lark('start: "q" A "a" | "b"', "A: /a+/"),
    lark('start: "q" A "a" | "b"', "A: /[a-a]+/"),
    lark('start: "q" A "xyzw" | "b"', "A: /(xyzw){1,600000}/"),
    lark('start: "q" /[ab]/ n2 n1{10}', "n1: n2{1000}", f"n2: /y{{60}}/ | {NOTHING} n1"),
    lark('start: "q" a | "b"', 'a: "a" a'),
    lark('start: "q" ":" | "b"', "%ignore /:+/"),
    lark('start: "q" r0 | "b"', *doubled(100, '"fghij"')),
    lark('start: "q" r0 | "b"', *doubled(20, "/y{4000}/")),
    StructuredOutputs(regex="q(xy){20000}|b"),
    StructuredOutputs(choice=["q" + "the quick brown fox " * 2000, "b"]),
]
"""Grammars that force texts without end, or very long ones, after a "q"."""


@pytest.mark.parametrize("structured", ENDLESS)
def test_a_text_without_end_is_an_error(
    structured: StructuredOutputs, tokenizer: GrammarTokenizer, native: LLTokenizer
) -> None:
    matcher = compile_matcher(tokenizer.get(), structured)
    for _ in range(2):  # the error of one constraint is none of the next
        constraint = constraint_of(matcher, tokenizer)
        for character in "qa":
            if not constraint.forced and constraint.error is None:
                constraint.follow(native.tokenize_str(character)[0])
            constraint.take_forced()
        assert next_tokens(constraint) == []
        assert constraint.error is not None
        assert re.search(TOO_LONG, constraint.error)
        assert not constraint.restart()


def test_a_grammar_that_begins_with_one_is_rejected(tokenizer: GrammarTokenizer) -> None:
    with pytest.raises(ValueError, match=TOO_LONG):
        compile_matcher(tokenizer.get(), lark('start: A "a"', "A: /a+/"))


@pytest.mark.parametrize(
    ("structured", "first", "expected"),
    [
        (StructuredOutputs(choice=["yes", "perhaps, or no"]), "p", "erhaps, or no"),
        (StructuredOutputs(choice=["a" + LONG, "b"]), "a", LONG),
        (StructuredOutputs(regex="a(fghij){600}|b"), "a", "fghij" * 600),
        (lark('start: "a" r0 | "b"', *doubled(8, '"fghij"')), "a", "fghij" * 2**8),
        (lark('start: "(" start " and more)" | "x"'), "(x", " and more)"),
        (StructuredOutputs(json=closed(city=text(), days=whole(1, 14)), disable_any_whitespace=True), "{", '"city":"'),
        (StructuredOutputs(json={"enum": ["celsius", "fahrenheit"]}), '"c', 'elsius"'),
        (StructuredOutputs(json={
            "$ref": "#/$defs/node",
            "$defs": {"node": closed(value=whole(0, 9), next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})},
        }, disable_any_whitespace=True), '{"value":1', ',"next":'),
    ],
)  # fmt: skip
def test_the_only_text_that_may_come_next_is_forced(
    structured: StructuredOutputs, first: str, expected: str, tokenizer: GrammarTokenizer, native: LLTokenizer
) -> None:
    constraint, written = constraint_of(compile_matcher(tokenizer.get(), structured), tokenizer), ""
    while len(written) < len(first):
        token = constraint.take_forced()
        if token is None:
            [token] = native.tokenize_str(first[len(written)])
            constraint.follow(token)
        written += native.decode_str([token])
    written += native.decode_str(constraint.forced)
    assert (first + expected).startswith(written)
    assert len(written) >= len(first + expected) - 8  # the last token may go on with what follows


def test_a_busy_thread_may_force_many_texts(tokenizer: GrammarTokenizer, native: LLTokenizer) -> None:
    """The limit is one of each call."""
    matcher = compile_matcher(tokenizer.get(), StructuredOutputs(choice=["a" + LONG, "b"]))
    for _ in range(20):
        constraint = constraint_of(matcher, tokenizer)
        constraint.follow(native.tokenize_str("a")[0])
        assert constraint.error is None
        assert len(constraint.forced) > 100


TOOL: Schema = closed_object(
    {"city": text(), "days": whole(1, 14), "unit": {"enum": ["celsius", "fahrenheit"]}}, ("unit",)
)


@pytest.mark.parametrize("name", FORMATS)
def test_what_surrounds_a_call_is_forced(name: str, tokenizer: GrammarTokenizer, native: LLTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": TOOL}}
    form = AnswerFormat(name, "qwen3")
    params = form.params(
        SamplingParams(), "<|im_start|>assistant\n<think>\n\n</think>\n\n", check_tools([tool], "required")
    )
    assert params.structured_outputs is not None
    matcher = compile_matcher(tokenizer.get(), params.structured_outputs)
    random, longest = Random(name), 0
    constraint = constraint_of(matcher, tokenizer)
    for _ in range(60):
        longest = max(longest, len(native.decode_str(constraint.forced)))
        while constraint.take_forced() is not None:
            pass
        if constraint.has_ended or not (tokens := next_tokens(constraint)):
            break
        constraint.follow(random.choice(tokens))
    assert constraint.error is None
    assert longest > len("get_weather")


def test_any_random_grammar_is_followed_or_fails(tokenizer: GrammarTokenizer) -> None:
    """Nothing interrupts one that forces a text without end, if its limit does not."""
    num_compiled = num_failed = 0
    for seed in range(400):
        random = Random(seed)
        try:
            matcher = compile_matcher(tokenizer.get(), random_grammar(random))
        except ValueError:  # such as one that allows no text
            continue
        num_compiled += 1
        for _ in range(4):
            constraint = constraint_of(matcher, tokenizer)
            for _ in range(12):
                while constraint.take_forced() is not None:
                    pass
                if constraint.has_ended or not (tokens := next_tokens(constraint)):
                    break
                constraint.follow(random.choice(tokens))
            num_failed += constraint.error is not None
    assert num_compiled > 200
    assert num_failed > 10


def test_a_grammar_that_cannot_be_read_is_an_error(tokenizer: GrammarTokenizer) -> None:
    for wrong in ("start: nowhere", 'start: "a', "start: (" * 9):
        with pytest.raises(ValueError, match=r"\w"):
            compile_matcher(tokenizer.get(), lark(wrong))
