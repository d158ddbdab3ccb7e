from __future__ import annotations

import json
from typing import Any

import pytest

from quire.frontend.text.chat.schema_types import ALL_TYPES, as_json, python_as_json, value_types

ROOT = {
    "$defs": {
        "name": {"type": "string"},
        "same": {"$ref": "#/$defs/name"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
        "a/b": {"type": "boolean"},
        "many": {"anyOf": [{"$ref": "#/$defs/many"}] * 40},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, ALL_TYPES),
        ({"type": "string", "enum": ["a", 1]}, {"string"}),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, {"string", "array"}),
        ({"oneOf": [{"type": "string"}, {"const": None}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"$ref": "#/$defs/same"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "#/$defs/many"}, ALL_TYPES),
        ({"$ref": "#/nowhere"}, ALL_TYPES),
        ({"$ref": "http://x"}, ALL_TYPES),
        ({"type": "text"}, ALL_TYPES),
        ({"type": [{}]}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    assert value_types(schema, ROOT) == types


def test_references_that_branch_take_no_time() -> None:
    chain: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    root = {"$defs": {**chain, "d40": {"type": "string"}}}
    assert value_types({"$ref": "#/$defs/d0"}, root) == {"string"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        (' "5" ', {"string"}, ' "5" '),
        ("5", {"integer", "number"}, 5),
        (" 5 ", {"integer", "string"}, 5),
        ("5.5", {"integer", "string"}, "5.5"),
        ("5.0", {"integer", "string"}, 5.0),
        ("null", {"string", "null"}, None),
        ("nothing", {"string", "null"}, "nothing"),
        ("True", {"boolean"}, True),
        ("None", {"null", "object"}, None),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': [True, None, -1, 'x']}", {"object"}, {"a": [True, None, -1, "x"]}),
        ("[1]", {"object"}, [1]),
        ("Rome", {"integer"}, "Rome"),
        ("NaN", {"number"}, "NaN"),
        ("1" * 5000, {"string", "number"}, "1" * 5000),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("5", ALL_TYPES, 5),
        ("Rome", ALL_TYPES, "Rome"),
    ],
)
def test_values_without_quotes(text: str, types: set[str], value: Any) -> None:
    found = json.loads(as_json(text, frozenset(types)))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "text", ["", "a", "f()", "1 + 1", "[a]", "{1: 2}", "{**{}}", "1e999", "b'x'", "...", "1j", "x=1"]
)
def test_what_is_no_literal(text: str) -> None:
    assert python_as_json(text) is None
