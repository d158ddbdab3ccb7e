"""Fifty JSON schemas of all kinds, whose answers end soon with any model."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

MAX_TOKENS = 400
"""Number of tokens that is enough for an answer without white space."""


def text(most: int = 6, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(least: int = 0, most: int = 99) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def closed_object(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """Return an object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def closed(**properties: Schema) -> Schema:
    """Return an object with exactly these properties, all of them required."""
    return closed_object(properties)


def items(of: Schema, least: int = 0, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most, **more}


_POINT = closed(x=whole(-9, 9), y=whole(-9, 9))
_COLOURS = ["red", "green", "blue"]

SCHEMAS: dict[str, Schema] = {
    # One value
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "short string": text(8),
    "string of some length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern of alternatives": {"type": "string", "pattern": "^(north|south)-(east|west)$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integer from 1 to 6": whole(1, 6),
    "negative integer": whole(-500, -100),
    "integer between exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    "multiple of 5": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "number from 0 to 1": closed(share={"type": "number", "enum": [0, 0.25, 0.5, 0.75, 1]}),
    "string enum": {"type": "string", "enum": _COLOURS},
    "enum of many types": {"enum": ["a", 1, True, None, [1, 2], {"k": "v"}]},
    "const string": {"const": "yes"},
    "const object": {"const": {"a": [1, 2, {"b": None}], "c": "ü"}},
    "unicode enum": {"enum": ["café", "naïve", "日本", "🙂"]},
    "quotes and escapes": {"enum": ['say "hi"', "back\\slash", "line\nbreak", "tab\t"]},
    # Arrays
    "array of integers": items(whole(), 1, 4),
    "array of exactly two": items(text(3), 2, 2),
    "empty array": items(whole(), 0, 0),
    "tuple": {
        "type": "array",
        "prefixItems": [text(3), whole(), {"type": "boolean"}],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "matrix": items(items(whole(0, 9), 2, 2), 2, 2),
    "array of objects": items(_POINT, 1, 2),
    "array of enums": items({"enum": _COLOURS}, 1, 5),
    # Objects
    "point": _POINT,
    "person": closed(
        name=text(10), age=whole(0, 130), email={"type": "string", "pattern": "^[a-z]{1,6}@[a-z]{1,6}\\.org$"}
    ),
    "optional properties": closed_object({"a": whole(), "b": text(3), "c": {"type": "boolean"}}, ("b", "c")),
    "nested three deep": closed(a=closed(b=closed(c=closed(d=whole())))),
    "address book": closed(people=items(closed(name=text(5), phones=items(text(4), 0, 2)), 1, 2), count=whole()),
    "keys that need escapes": closed_object({'a "quoted" key': whole(), "back\\slash": whole(), "ключ": whole()}),
    "empty object": closed(),
    "map with few keys": {
        "type": "object",
        "properties": {"id": whole()},
        "required": ["id"],
        "patternProperties": {"^x_[a-c]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    "tool call": closed(name={"const": "get_weather"}, arguments=closed(city=text(8), unit={"enum": ["C", "F"]})),
    "classification": closed(label={"enum": ["spam", "ham"]}, score=whole(0, 100), reasons=items(text(6), 0, 2)),
    # Alternatives
    "string or null": {"type": ["string", "null"], "maxLength": 5},
    "null union in an object": closed(a={"anyOf": [whole(), {"type": "null"}]}, b={"type": ["boolean", "null"]}),
    "any of three types": {"anyOf": [text(4), whole(), {"type": "boolean"}]},
    "tagged union": {
        "anyOf": [
            closed(kind={"const": "circle"}, radius=whole(1, 9)),
            closed(kind={"const": "box"}, width=whole(1, 9), height=whole(1, 9)),
        ]
    },
    "one of by const": {"oneOf": [closed(t={"const": 1}, v=whole()), closed(t={"const": 2}, v=text(3))]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": whole()}, "required": ["a"]},
            {"type": "object", "properties": {"b": text(3)}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    # References
    "definitions": {
        "$defs": {"point": _POINT, "colour": {"enum": _COLOURS}},
        **closed(at={"$ref": "#/$defs/point"}, colour={"$ref": "#/$defs/colour"}),
    },
    "old definitions": {"definitions": {"n": whole(1, 5)}, **items({"$ref": "#/definitions/n"}, 1, 3)},
    "references to references": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {"enum": ["deep", "deeper"]}},
        **closed(value={"$ref": "#/$defs/a"}),
    },
    "recursive list of bounded width": {
        "$defs": {"node": closed(v=whole(0, 9), next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
        "$ref": "#/$defs/node",
    },
    "recursive tree": {
        "$defs": {"tree": closed(v={"type": "boolean"}, kids=items({"$ref": "#/$defs/tree"}, 0, 1))},
        "$ref": "#/$defs/tree",
    },
}
