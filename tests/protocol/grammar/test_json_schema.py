"""Objects of JSON schemas are closed where they say nothing else, however they are combined."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from allowed_texts import AllowedTexts
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.protocol.grammar.json_schema import WHITESPACE, enforced_schema

NUMBER: Any = {"type": "integer"}
A: Any = {"properties": {"a": NUMBER}}
B: Any = {"properties": {"b": NUMBER}}
DEFS: Any = {"$defs": {"A": A, "B": {**B, "required": ["b"]}}}


def ref(name: str) -> Any:
    return {"$ref": f"#/$defs/{name}"}


def allowed_by(schema: Any) -> AllowedTexts:
    options: Any = {"lenient": False, "whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    text = json.dumps(enforced_schema(schema))
    return AllowedTexts(LLMatcher.grammar_from_json_schema(text, overrides=options))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, ['{"a":1}', "{}"], ['{"a":1,"b":1}', '{"b":1}']),
        ({"properties": {}}, ["{}"], ['{"b":1}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"b":"x"}'], []),
        ({**A, "additionalProperties": {}}, ['{"a":1,"b":"x"}'], []),
        ({**A, "additionalProperties": NUMBER}, ['{"a":1,"b":2}'], ['{"a":1,"b":"x"}']),
        ({"type": "object"}, ['{"a":1,"b":2}'], []),
        ({**A, "required": ["b"]}, ['{"b":"x"}', '{"a":1,"b":2}'], ['{"a":1}', '{"b":1,"c":1}']),
        ({"items": {"properties": {"x": A}}}, ['[{"x":{"a":1}}]'], ['[{"x":{"b":1}}]', '[{"y":1}]']),
        ({"prefixItems": [A], "items": B}, ['[{"a":1},{"b":1}]'], ['[{"b":1}]']),
        ({"additionalProperties": A}, ['{"x":{"a":1},"y":{}}'], ['{"x":{"b":1}}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
        ({"allOf": [A], "description": "alone"}, ['{"a":1}'], ['{"b":1}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":1}', '{"b":1}'], ['{"c":1}', '{"a":"x"}']),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a":1,"b":1,"c":"x"}'], []),
        (
            {**A, "anyOf": [{**B, "required": ["b"]}, {"required": ["a"]}]},
            ['{"b":1}', '{"a":1}'],
            ["{}", '{"a":1,"c":1}'],
        ),
        ({**DEFS, **ref("A")}, ['{"a":1}'], ['{"b":1}']),
        (
            {**DEFS, "properties": {"x": {"allOf": [ref("A"), ref("B")]}, "y": ref("A")}},
            ['{"x":{"a":1,"b":1},"y":{"a":1}}', '{"x":{"b":1}}'],
            ['{"y":{"b":1}}', '{"x":{"a":1}}', '{"x":{"b":1,"c":1}}'],
        ),
        ({**DEFS, **ref("A"), **B}, ['{"a":1,"b":1}'], ['{"c":1}', '{"b":1,"c":1}']),
        (
            {"$defs": {"N": {"properties": {"v": NUMBER, "n": ref("N")}}}, **ref("N")},
            ['{"v":1,"n":{"v":2,"n":{}}}'],
            ['{"v":1,"n":{"w":1}}'],
        ),
        ({"shapes": {"A": A}, "$ref": "#/shapes/A"}, ['{"a":1}'], ['{"b":1}']),
        ({"const": {"properties": {"a": 1}}}, ['{"properties":{"a":1}}'], []),
        ({"properties": {"properties": A}}, ['{"properties":{"a":1}}'], ['{"properties":{"b":1}}', '{"a":1}']),
        (
            {"properties": {"a": NUMBER}, "patternProperties": {"^k[&&a]$": {"const": 1}}},
            ['{"a":1,"k&":1}'],
            ['{"a":1,"kb":1}', '{"z":1}'],
        ),
        ({"type": "string", "pattern": "^[^&&[]{2}$"}, ['"ab"', '"|-"'], ['"&&"', '"a["']),
        ({"type": "object", "minProperties": 1}, ['{"k":1}'], ["{}"]),
        (
            {**A, "required": ["a"], "minProperties": 2, "additionalProperties": NUMBER},
            ['{"a":1,"k":1}'],
            ['{"a":1}', '{"a":1,"a":1}'],
        ),
    ],
)
def test_objects_have_the_properties_that_are_named(schema: Any, right: list[str], wrong: list[str]) -> None:
    given = json.dumps(schema)
    allowed_by(schema).check(right, wrong)
    assert json.dumps(schema) == given


def test_white_space_between_tokens_is_bounded() -> None:
    allowed = allowed_by({**A, "required": ["a"]})
    allowed.check(['{"a":1}', '{ "a" : 1 }', '{  "a":1}', '{\n    "a": 1\n}', '{\r\n\t"a":1}'], [])
    allowed.check([], ['{   "a":1}', '{\n\n"a":1}', '{ \n "a":1}', '{\n  \n"a":1}', "{\n" + " " * 17 + '"a":1}'])


K: Any = {"patternProperties": {"^k$": {"const": 1}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {**K, "minProperties": 2, "maxProperties": 2},
        {"type": "object", "minProperties": 2},
        {"properties": {"x": {"items": {**K, "minProperties": 2}}}},
        {**A, "required": ["a"], "minProperties": 3, "additionalProperties": True},
        {"allOf": [K, {"minProperties": 2}]},
        {"type": ["object", "null"], "minProperties": 2},
        {"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 2}]},
    ],
)
def test_names_that_could_come_twice_and_count_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"minProperties=\d can't be enforced .* could come twice"):
        enforced_schema(schema)
    assert "could come twice" not in str(enforced_schema(schema, is_strict=False))


@pytest.mark.parametrize("number", [500, 501])
def test_an_object_has_at_most_500_properties_unless_it_requires_one(number: int) -> None:
    """At the first one that may come, llguidance fails otherwise."""
    names = [f"p{index}" for index in range(number)]
    large: Any = {"type": "object", "properties": {**dict.fromkeys(names, NUMBER), "never": False}}
    schema = {"type": "array", "items": large}
    allowed_by({**schema, "items": {**large, "required": ["p0"]}}).check(['[{"p0":1,"p7":1}]'], ["[{}]"])
    if number == 500:
        allowed_by(schema).check(['[{},{"p0":1,"p7":1}]'], ['[{"never":1}]'])
        return
    with pytest.raises(ValueError, match="an object has 501 properties and requires none, and 500 of such can be"):
        enforced_schema(schema)
    assert enforced_schema(schema, is_strict=False) == {"type": "array", "items": {"type": "object"}}


def test_what_is_not_strict_leaves_out_what_cannot_be_enforced() -> None:
    schema = {"type": "object", "minProperties": 2, "patternProperties": {"a{,2}": NUMBER, "b": {"pattern": "[[:x:]]"}}}
    with pytest.raises(ValueError, match="a quantifier in Python"):
        enforced_schema(schema)
    assert enforced_schema(schema, is_strict=False) == {"type": "object", "patternProperties": {"b": {}}}


def test_a_combined_reference_has_a_path() -> None:
    schema = {"$defs": {"A": {**A, "$anchor": "a"}}, "properties": {"x": {"$ref": "#a"}}}
    allowed_by(schema).check(['{"x":{"a":1}}'], ['{"x":{"b":1}}'])
    with pytest.raises(ValueError, match=r"\$ref='#a' can't be combined .* such as '#/\$defs/name'"):
        enforced_schema({**schema, "allOf": [{"$ref": "#a"}, B]})
    allowed_by({**A, "allOf": [{"$ref": "#/$defs/B%201"}], "$defs": {"B 1": B}}).check(['{"a":1,"b":1}'], ['{"c":1}'])


def test_schemas_that_combine_too_many_others_are_refused() -> None:
    many = {f"a{i}": {"allOf": [ref(f"a{i + 1}") if i % 90 else B, A]} for i in range(2000)}
    with pytest.raises(ValueError, match="it combines schemas"):
        enforced_schema({"$defs": many, **ref("a0")})
    deep: Any = A
    for _ in range(20_000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(ValueError, match="beyond the recursion limit"):
        enforced_schema(deep)


NAMES = st.sampled_from("abc")
LEAF: Any = st.sampled_from(
    [NUMBER, {"type": "string"}, {}, True, {"const": 1}, {"enum": [1, "x"]}, {"type": "object"}]
)


def objects(inner: Any, others: Any) -> Any:
    """Return schemas of objects, and what combines them; `others`: what they may say of further properties."""
    parts = {
        "type": st.sampled_from(["object", ["object", "integer"]]),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "required": st.lists(NAMES, min_size=1, max_size=2, unique=True),
        "$ref": st.just("#/$defs/d"),
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), st.lists(inner, min_size=1, max_size=2)),
    }
    return st.fixed_dictionaries({}, optional={**parts, "additionalProperties": others})


CLOSED: Any = st.recursive(LEAF, lambda inner: objects(inner, st.sampled_from([True, False, NUMBER])), max_leaves=5)
OPEN: Any = st.recursive(
    LEAF,
    lambda inner: objects(inner, st.just(True)).map(lambda schema: {**schema, "additionalProperties": True}),
    max_leaves=5,
)
PLAIN: list[Any] = [1, "x", None, [], {}, *({name: value} for name in "abc" for value in (1, "x", {}, {"a": 1}))]
PAIRS: list[Any] = [
    {names[0]: one, names[1]: other} for names in ("ab", "ac", "bc") for one, other in ((1, 1), ("x", 1), (1, {}))
]
VALUES = [*PLAIN, *PAIRS, {"a": 1, "b": 1, "c": 1}]


@settings(max_examples=150, deadline=None)
@given(CLOSED, CLOSED)
def test_what_is_allowed_is_valid(schema: Any, definition: Any) -> None:
    check_against_validator(schema, definition, is_open=False)


@settings(max_examples=100, deadline=None)
@given(OPEN, OPEN)
def test_what_is_valid_is_allowed_where_nothing_is_closed(schema: Any, definition: Any) -> None:
    check_against_validator(schema, definition, is_open=True)


def check_against_validator(schema: Any, definition: Any, *, is_open: bool) -> None:
    assume(isinstance(schema, dict))
    whole = {**schema, "$defs": {"d": definition}}
    validator = jsonschema.Draft202012Validator(whole)
    try:
        allowed = allowed_by(whole)
        valid = [value for value in VALUES if validator.is_valid(value)]
    except (ValueError, RecursionError):  # it can't be enforced, or has no values, or no end
        assume(False)
    found = [value for value in VALUES if any(text in allowed for text in orders(value))]
    assert [value for value in found if value not in valid] == []
    if is_open:
        assert found == valid


def orders(value: Any) -> list[str]:
    """Return the texts of a value with its properties in any order."""
    if not isinstance(value, dict):
        return [json.dumps(value)]
    return [json.dumps(dict(items)) for items in itertools.permutations(value.items())]


KEYWORDS = [
    *(
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "type",
        "pattern",
        "$ref",
    ),
    *(
        "$defs",
        "allOf",
        "anyOf",
        "oneOf",
        "items",
        "not",
        "const",
        "a",
        "#/$defs/a",
        "#/allOf/0",
        "#",
        "object",
        "x{,3}",
    ),
]
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-1, 3), st.sampled_from(KEYWORDS))
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
)


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=5), st.booleans())
def test_whatever_is_given_is_a_schema_or_an_error(schema: Any, is_strict: bool) -> None:
    try:
        enforced = enforced_schema(schema, is_strict=is_strict)
    except ValueError:
        return
    assert json.loads(json.dumps(enforced)) == enforced
