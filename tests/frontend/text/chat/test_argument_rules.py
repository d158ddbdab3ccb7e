"""Grammars of arguments in tags and as keyword arguments, against the schema and the parser."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import parse_answer
from quire.frontend.text.chat.tools import ToolError, ToolUse, check_tools

TOKENIZER = LLTokenizer("byte")
NAMES = ["qwen3_coder", "olmo3", "lfm2", "gemma4", "glm45", "glm47", "seed_oss", "minimax_m2"]
QUOTE = '<|"|>'


def use_of(parameters: Any, strict: bool = False) -> ToolUse:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    use = check_tools([{"type": "function", "function": function}], "required", parallel_tool_calls=False)
    assert use is not None
    return use


def parser_of(name: str) -> str:
    """Return the parser of a format: that of GLM-4.5 reads GLM-4.7's too."""
    return "glm45" if name == "glm47" else name


def matcher(name: str, use: ToolUse) -> LLMatcher:
    grammar = LLMatcher.grammar_from_lark(AnswerFormat(parser_of(name)).grammar("", use) or "")
    error, messages = LLMatcher.validate_grammar_with_warnings(grammar, TOKENIZER)
    assert not error, messages
    return LLMatcher(TOKENIZER, grammar)


def written(name: str, arguments: dict[str, Any]) -> str:
    """Return a call; in tags a text is given as it is."""
    if name == "olmo3":
        items = ", ".join(f"{key}={json.dumps(each)}" for key, each in arguments.items())
        return f"<function_calls>\nf({items})\n</function_calls>"
    if name == "lfm2":
        items = ", ".join(f"{key}={json.dumps(each)}" for key, each in arguments.items())
        return f"<|tool_call_start|>[f({items})]<|tool_call_end|>"
    if name == "gemma4":
        return f"<|tool_call>call:f{in_notation(arguments)}<tool_call|>"
    texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
    if name.startswith("glm"):
        gap = "\n" if name == "glm45" else ""
        pairs = (f"<arg_key>{key}</arg_key>{gap}<arg_value>{text}</arg_value>{gap}" for key, text in texts.items())
        return f"<tool_call>f{gap}{''.join(pairs)}</tool_call>"
    if name == "seed_oss":
        tags = "".join(f"<parameter={key}>{text}</parameter>\n" for key, text in texts.items())
        return f"<seed:tool_call>\n<function=f>\n{tags}</function>\n</seed:tool_call>"
    if name == "minimax_m2":
        tags = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts.items())
        return f'<minimax:tool_call>\n<invoke name="f">\n{tags}</invoke>\n</minimax:tool_call>'
    tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"


def in_notation(value: Any) -> str:
    """Return a value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_notation(each)}" for key, each in value.items()) + "}"
    return f"[{','.join(map(in_notation, value))}]" if isinstance(value, list) else json.dumps(value)


def in_json(value: Any) -> str:
    """Return a value as Gemma 4 writes it whose elements are in JSON."""
    return f"[{','.join(map(json.dumps, value))}]" if isinstance(value, list) else json.dumps(value)


def allows(name: str, use: ToolUse, arguments: dict[str, Any]) -> bool:
    """Return True if the grammar allows the call; the parser must then read these arguments.

    Gemma 4's calls may be in JSON, or have values in it, where its notation cannot express the schema.
    """
    texts = [written(name, arguments)]
    if name == "gemma4":
        values = ",".join(f"{key}:{in_json(value)}" for key, value in arguments.items())
        texts += [f"<|tool_call>call:f{text}<tool_call|>" for text in (f"{{{values}}}", json.dumps(arguments))]
    return any(allows_text(name, use, arguments, text) for text in texts)


def allows_text(name: str, use: ToolUse, arguments: dict[str, Any], text: str) -> bool:
    driven, tokens = matcher(name, use), TOKENIZER.tokenize_str(text)
    is_allowed = driven.try_consume_tokens(tokens) == len(tokens) and driven.is_accepting()
    if is_allowed:
        [call] = parse_answer(text, AnswerFormat(parser_of(name)).parser("", use)).tool_calls
        assert json.loads(call.arguments) == arguments
    return bool(is_allowed)


def properties(required: list[str] | None = None, **schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas, "required": required or []}


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "maximum": 9}
MANY = properties(["b", "d"], a=TEXT, b=NUMBER, c=NUMBER, d=TEXT, e={"type": "boolean"})


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_may_lack(name: str) -> None:
    use = use_of(MANY)
    right: list[dict[str, Any]] = [
        {"b": 1, "d": "x"},
        {"a": "", "b": 1, "c": 2, "d": "x", "e": True},
        {"b": 1, "c": 2, "d": "y", "e": False},
    ]
    assert all(allows(name, use, arguments) for arguments in right)
    wrong: list[dict[str, Any]] = [
        {},
        {"b": 1},
        {"d": "x"},
        {"d": "x", "b": 1},
        {"b": 10, "d": "x"},
        {"b": 1, "d": "x", "z": 1},
    ]
    assert not any(allows(name, use, arguments) for arguments in wrong)
    optional = use_of(properties(a=TEXT, b=NUMBER))
    some: list[dict[str, Any]] = [{}, {"a": "x"}, {"b": 1}, {"a": "x", "b": 1}]
    assert all(allows(name, optional, each) for each in some)
    assert not allows(name, optional, {"b": 1, "a": "x"})
    assert allows(name, use_of(None), {})
    assert not allows(name, use_of(None), {"a": 1})


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_are_linear_in_the_number_of_arguments(name: str) -> None:
    """They are written before their length is looked at."""
    lengths = []
    for count in (1000, 2000):
        use = use_of({"type": "object", "properties": {f"a{number:04}": {} for number in range(count)}})
        lengths.append(len(AnswerFormat(parser_of(name)).grammar("", use) or ""))
    assert 1.5 < lengths[1] / lengths[0] < 2.2


def test_texts_in_tags() -> None:
    free = use_of(properties(["a"], a=TEXT))
    for text in ("", "\n", 'He said "no\\yes".\n\n', "<parameter=b>\n", "</function>", "5", "null", "é🙂"):
        assert allows("qwen3_coder", free, {"a": text})
    assert not allows("qwen3_coder", free, {"a": "x</parameter>"})
    short = use_of(properties(["a"], a={"type": "string", "minLength": 1, "maxLength": 3}))
    assert [allows("qwen3_coder", short, {"a": text}) for text in ("", "a", "a\nb", "abcd")] == [
        False,
        True,
        True,
        False,
    ]
    chosen = use_of(properties(["a"], a={"enum": ["x", "two\nlines", 3, None]}))
    assert all(allows("qwen3_coder", chosen, {"a": value}) for value in ("x", "two\nlines", 3, None))
    assert not allows("qwen3_coder", chosen, {"a": "y"})
    maybe = use_of(properties(["a"], a={"anyOf": [TEXT, {"type": "null"}]}), strict=True)
    assert all(allows("qwen3_coder", maybe, {"a": value}) for value in ("x", "5", None))


def test_the_notation_of_gemma4_wherever_it_can_express_the_schema() -> None:
    inner = properties(["k"], Z={"type": "array", "items": TEXT}, k={"enum": ["x", ""]})
    use = use_of(properties(["o"], s={**TEXT, "title": "S"}, o=inner, n=NUMBER))
    calls: list[dict[str, Any]] = [
        {"o": {"k": "x"}},
        {"n": 5, "o": {"k": "", "Z": []}, "s": 'a "b"\n<|'},
        {"n": 5, "o": {"k": "x", "Z": ["a", "é"]}},
    ]
    assert all(allows_text("gemma4", use, each, written("gemma4", each)) for each in calls)
    wrong: list[dict[str, Any]] = [
        {},
        {"o": {}},
        {"o": {"k": "y"}},
        {"o": {"k": "x"}, "n": 5},
        {"o": {"k": "x", "Z": [1]}},
    ]
    assert not any(allows_text("gemma4", use, each, written("gemma4", each)) for each in wrong)


def test_texts_of_gemma4_that_only_json_can_hold_or_bound() -> None:
    bounded = use_of(properties(["a"], a={**TEXT, "pattern": "^[a-z]{1,3}$"}), strict=True)
    assert allows_text("gemma4", bounded, {"a": "abc"}, '<|tool_call>call:f{a:"abc"}<tool_call|>')
    assert not any(allows("gemma4", bounded, {"a": text}) for text in ("abcd", "1"))
    marked = use_of(properties(["a:b"], **{"a:b": {"enum": [f"x{QUOTE}"]}}))
    assert allows("gemma4", marked, {"a:b": f"x{QUOTE}"})
    assert not allows("gemma4", marked, {"a:b": "x"})


@pytest.mark.parametrize("name", NAMES)
def test_references_are_to_the_schema_of_all_arguments(name: str) -> None:
    node = {"type": "object", "properties": {"n": NUMBER, "next": {"$ref": "#/$defs/node"}}, "required": ["n"]}
    schema = {**properties(["a"], a={"$ref": "#/$defs/node"}), "$defs": {"node": node}}
    use = use_of(schema)
    assert allows(name, use, {"a": {"n": 1, "next": {"n": 2}}})
    assert not allows(name, use, {"a": {"n": 1, "next": {}}})
    again = use_of(properties(a={"type": "array", "items": {"$ref": "#"}}))
    assert allows(name, again, {"a": [{}, {"a": []}]})
    assert not allows(name, again, {"a": [1]})
    text = use_of({**properties(["a"], a={"$ref": "#/$defs/text"}), "$defs": {"text": {**TEXT, "maxLength": 2}}})
    assert [allows(name, text, {"a": each}) for each in ("ab", "abc")] == [True, False]


@pytest.mark.parametrize("name", NAMES)
def test_open_schemas_allow_other_arguments(name: str) -> None:
    use = use_of({**properties(["a"], a=NUMBER), "additionalProperties": True})
    assert all(allows(name, use, each) for each in ({"a": 1}, {"a": 1, "x": "words", "y": [2]}))
    assert not allows(name, use, {"x": 1})
    composed = use_of({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert all(allows(name, composed, each) for each in ({"b": 1}, {"b": 1, "a": {"c": "d"}}))
    assert allows(name, composed, {}) is (
        name != "gemma4"
    )  # whose calls can be in JSON, which enforces the alternatives


@pytest.mark.parametrize(
    ("schema", "where", "keyword"),
    [
        (properties(a={"type": "string", "pattern": "^a"}), ".properties.a", "pattern"),
        (properties(a={"type": ["string", "integer"], "maximum": 3}), ".properties.a", "maximum"),
        (properties(a={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}), ".properties.a", "format"),
        ({"type": "object", "minProperties": 1}, "", "minProperties"),
        ({"type": "object", "additionalProperties": NUMBER}, "", "additionalProperties"),
    ],
)
def test_what_strict_tools_cannot_have(schema: Any, where: str, keyword: str) -> None:
    with pytest.raises(ToolError, match=f"{keyword!r} is not supported in this model's calls") as caught:
        AnswerFormat("qwen3_coder").grammar("", use_of(schema, strict=True))
    assert caught.value.param == f"tools[0].function.parameters{where}"
    assert AnswerFormat("qwen3_coder").grammar("", use_of(schema))


@pytest.mark.parametrize("name", NAMES)
def test_objects_among_the_arguments_are_closed(name: str) -> None:
    use = use_of(properties(["a"], a=properties(k=NUMBER), b={**properties(k=NUMBER), "additionalProperties": True}))
    assert all(allows(name, use, each) for each in ({"a": {"k": 1}}, {"a": {}, "b": {"k": 1, "other": 2}}))
    assert not allows(name, use, {"a": {"k": 1, "other": 2}})


@pytest.mark.parametrize("name", ["hermes", "openai", "olmo3"])
def test_an_argument_that_cannot_be_enforced_is_an_error_if_the_tool_is_strict(name: str) -> None:
    schema = properties(["a"], a={"type": "object", "patternProperties": {"x{,3}": NUMBER}, "minProperties": 2})
    with pytest.raises(ToolError, match=r"cannot be enforced: .* a quantifier in Python") as caught:
        AnswerFormat(name).grammar("", use_of(schema, strict=True))
    place = "tools[0].function.parameters"
    assert caught.value.param == (f"{place}.properties.a" if name == "olmo3" else place)
    assert AnswerFormat(name).grammar("", use_of(schema))


@pytest.mark.parametrize(
    ("name", "key"),
    [("qwen3_coder", "a>b"), ("qwen3_coder", "a b"), ("olmo3", "a-b"), ("minimax_m2", 'a"b'), ("glm45", "a<b")],
)
def test_names_that_a_call_cannot_hold(name: str, key: str) -> None:
    with pytest.raises(ToolError, match=f"has the name '{key}', which this model's calls can't hold"):
        AnswerFormat(name).grammar("", use_of({"type": "object", "properties": {key: TEXT}}))


@pytest.mark.parametrize("name", NAMES)
def test_a_random_model_follows_the_schema(name: str) -> None:
    source = random.Random(name)
    short = {"type": "string", "maxLength": 5}
    schema = properties(["b", "d"], a=short, b=NUMBER, c={"type": ["integer", "null"]}, d={**short, "minLength": 2})
    use = use_of(schema)
    for _ in range(20):
        driven, tokens = matcher(name, use), list[int]()
        while not driven.is_stopped():
            token = source.choice([token for token, bias in enumerate(driven.compute_logit_bias()) if bias])
            driven.consume_token(token)
            tokens.append(token)
        text = bytes(token for token in tokens if token < 256).decode()
        [call] = parse_answer(text, AnswerFormat(parser_of(name)).parser("", use)).tool_calls
        jsonschema.validate(json.loads(call.arguments), schema)
