"""The bound on what grammars force: never too small, and large only where it has to be."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from json_schemas import SCHEMAS, Schema, closed, closed_object, items, text, whole
from paged_executor import allowed_tokens
from random_grammars import random_grammar

from quire.engine_core.grammar.forced_text import MAX_FORCED, longest_forced_text, without_forcing
from quire.engine_core.grammar.matching import compile_matcher
from quire.engine_core.grammar.text import grammar_source
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


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> GrammarTokenizer:
    return GrammarTokenizer(str(demo_model))


@pytest.fixture(scope="module")
def native(demo_model: Path) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer((demo_model / "tokenizer.json").read_text(encoding="utf-8"))


def bound(structured: StructuredOutputs) -> int:
    return longest_forced_text(*grammar_source(structured))


def lark(*rules: str) -> StructuredOutputs:
    return StructuredOutputs(grammar="\n".join(rules))


def doubled(times: int) -> StructuredOutputs:
    """Return a short grammar that forces 5 * 2 ** times characters."""
    return lark('start: "a" r0 | "b"', *(f"r{i}: r{i + 1} r{i + 1}" for i in range(times)), f'r{times}: "fghij"')


@pytest.mark.parametrize(
    ("structured", "expected"),
    [
        (StructuredOutputs(regex=r"a/b(xy){30}[^\]a]\d\x41\/"), 67),
        (StructuredOutputs(regex=r"(?:abc|d(e|fg){3,9}|h)x?"), 20),
        (StructuredOutputs(choice=["yes", "perhaps, or no"]), 16),
        (StructuredOutputs(json={"const": "x" * 50}), 8 + 52),
        (lark("start: a | b", 'a: "x"{3} b{2, 5}', 'b: ("y" | "zz") C?  // "comment"', "C: /[a-z]{4}/"), 9 + 5 * 8),
        (StructuredOutputs(grammar='root ::= "a" b{2,3}\nb ::= [a-c]+ "x"'), 11),
    ],
)
def test_the_longest_of_alternatives_and_the_least_of_repetitions(structured: StructuredOutputs, expected: int) -> None:
    assert bound(structured) == expected


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutputs(regex="(xy){4000}"),
        StructuredOutputs(regex="((a{100}){100}){100}"),
        StructuredOutputs(choice=["yes", LONG]),
        StructuredOutputs(json={"const": LONG}),
        StructuredOutputs(json={"enum": ["a", {"b": [LONG]}]}),
        StructuredOutputs(json=closed(**{LONG: text()})),
        StructuredOutputs(json={"type": "object", "required": [LONG]}),
        StructuredOutputs(json=items({"const": "fox"}, 2000, 2000)),
        StructuredOutputs(json=items(items(items({"const": "fox"}, 20, 20), 20, 20), 20, 20)),
        StructuredOutputs(json={"type": "string", "pattern": "^a*$", "minLength": 5000}),
        StructuredOutputs(json={"allOf": [{"pattern": "^(aa)*b?$"}, {"pattern": "^(aaa)*b$"}]}),
        StructuredOutputs(json=closed(**{f"n{i}": {"type": "number", "minimum": 1e300} for i in range(20)})),
        StructuredOutputs(json={"$ref": "#/$defs/d0", "$defs": {
            **{f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(13)},
            "d13": {"const": "fox"},
        }}),
        StructuredOutputs(json={"$ref": "other.json"}),
        StructuredOutputs(json={"type": "object"}, whitespace_pattern=" {5000}"),
        doubled(10),
        doubled(100),
        lark(f'start: "(" start "{LONG[:100]})" | "x"'),
        lark('start: "a" b', 'b: "b" c', f'c: "c" a | "{LONG[:90]}"', 'a: "a" b'),
        lark("start: a", 'a[suffix="%s"]: /a*/' % ("x" * 5000)),
        lark("start: A & B", "A: /(aa)*b/", "B: /(aaa)*b/"),
        lark("start: %lark {", f'start: "{LONG}"', "}"),
        lark('start: %json {"const": "' + LONG + '"}'),
        lark('start: "a"', "%ignore /x{5000}/"),
        lark("start: a{5}", "a{x}: x"),
        lark("start: nowhere"),
        lark('start: "' + "a" * (1 << 18) + '"'),
        StructuredOutputs(regex="(" * 20_000),
    ],
)  # fmt: skip
def test_what_may_be_long_or_is_not_understood(structured: StructuredOutputs) -> None:
    assert bound(structured) > MAX_FORCED


NOTHING = r"/[^\s\S]/"
REPEATED = {"const": "x" * 1000}


@pytest.mark.parametrize(
    "structured",
    [
        lark("start: /[ab]/big", "big: /y{10000}/{100}"),
        lark("start: /[ab]/ WS", "WS: /y{30000}/", "%import common.WS -> X"),
        lark("start: a", "a[suffix=BIG]: /[ab]/", "BIG: /y{30000}/"),
        lark("start: /[ab]/ n2 n1{10}", "n1: n2{1000}", f"n2: /y{{60}}/ | {NOTHING} n1"),
        lark('start: e', 'e: "(" e /y{59}/ | "z"'),
        lark("start: A{300}", "A: /(.|\\n){21}/ & ~/(.|\\n)*x/ BIG /z(.|\\n)*/", "BIG: /y{20}/"),
        lark("start: /[ab](yyyyyyyyyy) {3000}/x"),
        lark("start: A & /a{3}/", "A: /(.|\\n)*/"),
        lark("start: /(?x)a(yyyyyyyyyy) {3000}/"),
        StructuredOutputs(regex="a(y{ 1000 }){ 20 }"),
        StructuredOutputs(regex="a" + ("y" * 1000 + "[[b]&&b|]") * 5),
        StructuredOutputs(regex="a" + ("y" * 1000 + r"\x{62}") * 3),
        lark("start: /[ab]" + ("y" * 1000 + r"[\;;]") * 5 + "/"),
        lark('start: %json {"type": "string", "pattern": "^(?x:[ab](yyyyyyyyyy) {3000})$"}'),
        StructuredOutputs(json={"allOf": [{"type": "array", "minItems": 1000}, {"type": "array", "items": REPEATED}]}),
        StructuredOutputs(json={
            "$defs": {"a": {"type": "array", "items": REPEATED}}, "$ref": "#/$defs/a", "minItems": 300,
        }),
        StructuredOutputs(json={"type": "array", "minItems": 300, "anyOf": [{"items": REPEATED}]}),
        StructuredOutputs(json={
            "type": "object", "required": [f"k{i}" for i in range(100)], "additionalProperties": REPEATED,
        }),
        lark("start: %json " + json.dumps({
            "type": "object", "minProperties": 300, "patternProperties": {"^(?:xyz){5}$": REPEATED},
        })),
        StructuredOutputs(json={
            "type": "array", "items": [{"const": "a"}], "additionalItems": REPEATED, "minItems": 300,
        }),
        StructuredOutputs(json={
            "$defs": {"a%20b": {"const": "s"}, "a b": {"const": LONG}}, "$ref": "#/$defs/a%20b",
        }),
        StructuredOutputs(json=closed(
            q={"$id": "http://x/y", "$defs": {"z": {"const": LONG}}, **closed(p={"$ref": "#/$defs/z"})},
        )),
        StructuredOutputs(json={"const": [5e-324] * 300}),
        lark('start: "q" A "a" | "b"', "A: /a+/"),
        StructuredOutputs(grammar='root ::= "q" a "xyzw" | "b"\na ::= "xyzw"+'),
        lark('start: "q" A "xyzw" | "b"', "A: /(xyzw){1,6000}/"),
        lark('start: "q" A "a" | "b"', "A: /[a-a]+/"),
        lark('start: "b" ":" | "q"', "%ignore /:+/"),
        StructuredOutputs(json=closed(a={"const": 1}, b={"const": 2}), whitespace_pattern="(:)+"),
        lark('start: "a" b* N | "b"', "b: /x{3000}/", f"N: {NOTHING}"),
        lark('start: "q" ("xyzw"){1,6000} /[^\\d\\D]/ | "b"'),
        lark('start: "a" N | "b"', "N: /[^\\x00-\U0010ffff]/"),
        lark('start: "b" a* c | "q"', "a[lazy]: /x{1000}/", "c: /x{1000}v/"),
        lark('start: "b" a{1,30} c | "q"', "a[lazy]: /[xy]x{1000}/", "c: /x{1000}v/"),
        lark('start: "c" A | "b"', "A: /(a{37})+b/ /(.|\\n){0,1}/ & ~/(.|\\n)*a(.|\\n)*/ /(a{31})+b/"),
        lark('start: %json {"type": "object", "properties": [], "$ref": 5}'),
        lark('start: %json {"type": "array", "minItems": 1e400}'),
        lark('start: %json {"const": 1, "x-guidance": {"item_separator": "' + "," * 5000 + '"}}'),
    ],
)  # fmt: skip
def test_what_is_not_certain_to_be_read_as_llguidance_reads_it(structured: StructuredOutputs) -> None:
    """Each of these forced much more than a bound that took it for something else."""
    assert bound(structured) > MAX_FORCED


@pytest.mark.parametrize("part", ["[", "a[", "(", "/", '"', "\\p{", "{", "a ", "<", "%json ", "/(.|\\n)*/ & ~"])
def test_a_grammar_is_read_in_linear_time(part: str) -> None:
    """A quadratic one would take an hour."""
    size = (1 << 17) - 100
    parts = part * (size // len(part))
    for grammar in (parts, f"start: /{parts}/"):
        longest_forced_text("lark", grammar)


def constraint_of(matcher: Matcher, tokenizer: GrammarTokenizer) -> Constraint:
    return Constraint(matcher, tokenizer.get().num_tokens, [EOS])


def next_tokens(constraint: Constraint) -> list[int]:
    """Return the tokens that may come next, none at a dead end."""
    if constraint.begin_mask():
        constraint.write_mask()
    if constraint.error is not None:
        return []
    return [token for token in allowed_tokens(constraint.mask) if token != EOS]


@pytest.mark.parametrize(
    "structured",
    [doubled(40), StructuredOutputs(choice=["a" + LONG, "b"]), StructuredOutputs(regex="a(fghij){100000}|b")],
    ids=["rules", "choice", "regex"],
)
def test_nothing_is_forced_of_a_long_text(
    structured: StructuredOutputs, tokenizer: GrammarTokenizer, native: LLTokenizer
) -> None:
    """Each of its tokens is one that the mask allows."""
    constraint = constraint_of(compile_matcher(tokenizer.get(), structured), tokenizer)
    constraint.follow(native.tokenize_str("a")[0])
    written = ""
    for _ in range(20):
        assert not constraint.forced
        token = max(next_tokens(constraint), key=lambda each: len(native.decode_str([each])))
        constraint.follow(token)
        written += native.decode_str([token])
    assert (LONG if structured.choice else "fghij" * 100).startswith(written)
    assert len(written) > 20


TOOL: Schema = closed_object(
    {"city": text(), "days": whole(1, 14), "unit": {"enum": ["celsius", "fahrenheit"]}}, ("unit",)
)


def tool_grammars() -> dict[str, StructuredOutputs]:
    tools = check_tools(
        [
            {"type": "function", "function": {"name": f"get_weather_{number}", "strict": True, "parameters": TOOL}}
            for number in range(20)
        ],
        "required",
    )
    found = {}
    forms = {name: AnswerFormat(name, "qwen3") for name in FORMATS}
    marks = ("start", "channel", "message", "end", "call", "return", "constrain")
    forms["harmony"] = AnswerFormat("openai", "openai_gptoss", {f"<|{mark}|>": 9000 for mark in marks})
    for name, form in forms.items():
        params = form.params(SamplingParams(), "<|start|>assistant\n<think>\n", tools)
        assert params.structured_outputs is not None
        found[name] = params.structured_outputs
    return found


ORDINARY: dict[str, StructuredOutputs] = {
    **{name: StructuredOutputs(json=schema) for name, schema in SCHEMAS.items()},
    **{
        f"{name}, compact": StructuredOutputs(json=schema, disable_any_whitespace=True)
        for name, schema in SCHEMAS.items()
    },
    **tool_grammars(),
    "any object": StructuredOutputs(json_object=True),
    "sum": lark(
        'start: term (("+" | "-") term)*', 'term: factor ("*" factor)*', 'factor: /[0-9]{1,3}/ | "(" start ")"'
    ),
    "30 properties": StructuredOutputs(json=closed(**{f"property_{number}": TOOL for number in range(30)})),
}


def check_walks(
    matcher: Matcher, most: int, tokenizer: GrammarTokenizer, native: LLTokenizer, random: Random, num_tokens: int
) -> None:
    """Follow random tokens, and check what is forced after each of them."""
    for _ in range(4):
        constraint = constraint_of(matcher, tokenizer)
        for _ in range(num_tokens):
            assert len(native.decode_bytes(constraint.forced)) <= most
            while constraint.take_forced() is not None:
                pass
            if constraint.has_ended or not (tokens := next_tokens(constraint)):
                break
            constraint.follow(random.choice(tokens))


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_grammars_force_no_more_than_the_bound(
    name: str, tokenizer: GrammarTokenizer, native: LLTokenizer
) -> None:
    structured, random = ORDINARY[name], Random(name)
    most = bound(structured)
    is_unknown = name.startswith(("recursive", "map with few keys", "all of", "sum"))
    assert (most > MAX_FORCED) == is_unknown
    if name == "harmony":
        return  # its marks are no tokens of this model
    check_walks(compile_matcher(tokenizer.get(), structured), most, tokenizer, native, random, 60)


def test_no_random_grammar_forces_more_than_its_bound(tokenizer: GrammarTokenizer, native: LLTokenizer) -> None:
    """One whose bound is wrong may force a text without end, which nothing interrupts."""
    num_known = 0
    for seed in range(400):
        random = Random(seed)
        structured = random_grammar(random)
        if (most := bound(structured)) > MAX_FORCED:
            continue
        try:
            matcher = compile_matcher(tokenizer.get(), structured)
        except ValueError:  # such as one that allows no text
            continue
        num_known += 1
        check_walks(matcher, most, tokenizer, native, random, 12)
    assert num_known > 100


@pytest.mark.parametrize("name", [*list(SCHEMAS)[::5], "hermes", "qwen3_coder", "sum", "any object"])
def test_grammars_that_force_nothing_allow_the_same_texts(
    name: str, tokenizer: GrammarTokenizer, native: LLTokenizer
) -> None:
    source, random = grammar_source(ORDINARY[name]), Random(name)
    matchers = [Matcher(tokenizer.get(), *each) for each in (source, without_forcing(*source))]
    for writer, reader in [matchers, matchers[::-1]] * 8:
        constraint, written = constraint_of(writer, tokenizer), list[int]()
        while not constraint.has_ended and len(written) < 80:
            token = constraint.take_forced()
            if token is None:
                if not (tokens := next_tokens(constraint)):
                    break
                token = random.choice(tokens)
                constraint.follow(token)
            written.append(token)
        other = constraint_of(reader, tokenizer)
        other.replay(native.tokenize_bytes(native.decode_bytes(written)))
        assert other.has_ended or not constraint.has_ended


def test_a_grammar_that_cannot_be_read_is_an_error_as_before(tokenizer: GrammarTokenizer) -> None:
    for wrong in ("start: nowhere", 'start: "a', "start: (" * 9):
        with pytest.raises(ValueError, match=r"\w"):
            compile_matcher(tokenizer.get(), lark(wrong))
