"""The types of values that a JSON schema allows, for formats of tool calls that write texts without quotes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
STRING = frozenset({"string"})
_MAX_DEPTH = 200  # of schemas within or referred to by each other
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def value_types(schema: Any, root: Any) -> frozenset[str]:
    """Return the types that `schema`, a part of the schema `root`, allows; all if that is not clear."""
    return _value_types(schema, root, {}, 0) or ALL_TYPES


def _value_types(schema: Any, root: Any, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    """Return the types; `known` has those of parts by identity, so that the time is linear and cycles end."""
    if not isinstance(schema, Mapping) or depth == _MAX_DEPTH:
        return ALL_TYPES
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = ALL_TYPES
    types = _named_types(schema.get("type"))
    if isinstance(schema.get("enum"), list):
        types &= frozenset().union(*(_types_of(value) for value in schema["enum"]))
    if "const" in schema:
        types &= _types_of(schema["const"])
    if "$ref" in schema:
        types &= _value_types(resolve(schema["$ref"], root), root, known, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types &= frozenset().union(*(_value_types(each, root, known, depth + 1) for each in schema[key]))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= _value_types(each, root, known, depth + 1)
    known[id(schema)] = types
    return types


def resolve(reference: Any, root: Any) -> Any:
    """Return the part of `root` that a reference such as `#/$defs/x` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for key in filter(None, reference[1:].split("/")):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that is written as `text`, where a string has no quotes.

    A text that is no JSON of these types is a string if they include that, or if it is no literal at all.
    """
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    value = text.strip()
    value = _PYTHON_NAMES.get(value, value)
    found = parse_json(value)
    if found is not None and types & _types_of(found[0]):
        return value
    if "string" in types:
        return json.dumps(text, ensure_ascii=False)
    return value if found is not None else python_as_json(value) or json.dumps(text, ensure_ascii=False)


def parse_json(text: str) -> tuple[Any] | None:
    """Return the value of a JSON text, in a tuple; None if it is no JSON."""
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def python_as_json(text: str) -> str | None:
    """Return the JSON of a Python literal, in which `true`, `false` and `null` may stand too; None if it is none."""
    try:
        return json.dumps(_literal(ast.parse(text, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for any other expression."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("no literal")


def _named_types(given: Any) -> frozenset[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) and name in ALL_TYPES for name in names):
        return ALL_TYPES
    types = frozenset(names)
    return types | {"integer"} if "number" in types else types


def _types_of(value: Any) -> frozenset[str]:
    """Return the types that a value is of: 1 is a number and an integer."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"number", "integer"})
    names = {type(None): "null", str: "string", float: "number", list: "array"}
    return frozenset({names.get(type(value), "object")})


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
