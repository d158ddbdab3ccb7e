"""Rules of a grammar for the arguments of a call: as a JSON object, in tags, or as keyword arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.frontend.text.chat.schema_types import STRING, resolve, value_types
from quire.frontend.text.chat.tag_styles import GLM45, GLM47, MAX_KEY, MINIMAX_M2, QWEN3_CODER, SEED_OSS, TagStyle
from quire.frontend.text.chat.tools import Tool, ToolError
from quire.protocol.grammar.json_schema import enforced_schema

# The style of json.dumps and of the models. With free white space, a confused model may write nothing else.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords with which a schema's properties depend on more than `properties`.
COMPOSING = {"$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties", "unevaluatedProperties"}

ArgumentRules = Callable[[str, Tool, str], list[str]]
"""Makes the rule of a given name for the arguments of a tool, whose schema is at the given place of the request."""

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength"}
_KEY = re.compile(rf"[^<>\s]{{1,{MAX_KEY}}}")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_REFERENCE_ROOT = "quire_root"  # the name under which the whole schema is among the $defs of a part of it


def json_arguments(rule: str, tool: Tool, where: str = "") -> list[str]:
    """Return the rule of a JSON object. Raises ToolError if the tool is strict and can't be enforced."""
    try:
        return [f"{rule}: %json {json.dumps(closed_schema(tool))}"]
    except ValueError as error:
        raise _not_enforceable(where, error) from None


def closed_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of the arguments, closed to unnamed properties, which the model would invent.

    Raises ValueError if the tool is strict and can't be enforced.
    """
    schema = dict(tool.parameters or {"type": "object"})
    if not COMPOSING & set(schema):
        schema["additionalProperties"] = False
    return {**enforced_schema(schema, is_strict=tool.strict), "x-guidance": _style(tool)}


def qwen3_coder_arguments(rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of arguments in Qwen3-Coder's tags; see `_tagged_arguments`."""
    return _tagged_arguments(QWEN3_CODER, rule, tool, where)


def seed_oss_arguments(rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of arguments in Seed-OSS's tags; see `_tagged_arguments`."""
    return _tagged_arguments(SEED_OSS, rule, tool, where)


def minimax_m2_arguments(rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of arguments in MiniMax-M2's tags; see `_tagged_arguments`."""
    return _tagged_arguments(MINIMAX_M2, rule, tool, where)


def glm45_arguments(rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of arguments in GLM-4.5's tags; see `_tagged_arguments`."""
    return _tagged_arguments(GLM45, rule, tool, where)


def glm47_arguments(rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of arguments in GLM-4.7's tags, which are GLM-4.5's without line breaks."""
    return _tagged_arguments(GLM47, rule, tool, where)


def _tagged_arguments(style: TagStyle, rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of a tag with a key and a value for each argument, in the order of the schema.

    Raises ToolError for a key that a tag can't hold, and if the tool is strict for a keyword that is not enforced.
    """
    parts, rules = [], []
    for index, (key, schema, is_required) in enumerate(_properties(tool, where)):
        if not _KEY.fullmatch(key) or style.key_end[0][0] in key:
            raise _not_written(where, key)
        part = f"{rule}_{index}"
        parts.append(part if is_required else f"{part}?")
        rules += [f"{part}: {json.dumps(style.open + key + _key_end(style))} {part}_value"]
        rules += _tagged_value(style, f"{part}_value", schema, tool, f"{where}.properties.{key}")
    if _is_open(tool):
        parts.append(f"{rule}_any*")
        start, end = json.dumps(style.open), json.dumps(_key_end(style))
        rules.append(rf'{rule}_any: {start} /[^<>\s"]{{1,64}}/ {end} {rule}_any_value')
        rules += _text(style, f"{rule}_any_value")
    return [f"{rule}: {' '.join(parts) or _EMPTY}", *rules]


_EMPTY = '""'


def _key_end(style: TagStyle) -> str:
    """Return the text between a key and its value."""
    return style.gap.join(style.key_end) + (style.gap if style.is_spaced else "")


def _value_end(style: TagStyle) -> str:
    """Return the text after a value."""
    return (style.gap if style.is_spaced else "") + style.close + style.gap


def keyword_arguments(rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of `KEY=VALUE, ...` with values in JSON, in the order of the schema.

    Raises ToolError for a key that is no identifier, and if the tool is strict for a keyword that is not enforced.
    """
    properties, rules = list(_properties(tool, where)), list[str]()
    for index, (key, schema, _) in enumerate(properties):
        if not _IDENTIFIER.fullmatch(key):
            raise _not_written(where, key)
        value = json_value(schema, tool, f"{where}.properties.{key}")
        rules.append(f"{rule}_{index}: {json.dumps(key + '=')} {value}")
    items = [(f"{rule}_{index}", is_required) for index, (*_, is_required) in enumerate(properties)]
    more = ""
    if _is_open(tool):
        rules.append(
            rf'{rule}_any: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" %json {json.dumps({"x-guidance": _style(tool)})}'
        )
        more = f'(", " {rule}_any)*'
    return [*separated(rule, items, more, f"{rule}_any"), *rules]


def separated(
    rule: str, items: list[tuple[str, bool]], more: str = "", other: str = "", comma: str = ", ", around: str = "{}"
) -> list[str]:
    """Return rules for items in order, separated by commas; those that are not required may lack.

    `more` is a part for what may follow them, and `other` the first of it where there are none. `around` is what the
    first rule, which is named `rule`, has around them. What may follow an item has a rule of its own, so that the
    length of all is linear in the number of items.
    """
    ways, rest, rules = list[str](), more, list[str]()
    for index, (item, is_required) in reversed([*enumerate(items)]):
        ways = [*([] if is_required else ways), f"{item} {rest}"]
        name, separated_item = f"{rule}_from_{index}", f'"{comma}" {item}'
        rules.append(f"{name}: {separated_item if is_required else f'({separated_item})?'} {rest}")
        rest = name
    ways.reverse()
    if not any(is_required for _, is_required in items):
        ways += [f"{other} {more}"] * bool(more) + [_EMPTY]
    first = around.format(" | ".join(way.strip() for way in ways))
    return [f"{rule}: {first}", *rules[:-1]]  # nothing is before the first item


def _properties(tool: Tool, where: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield the key and the schema of each argument, and whether it is required."""
    schema = tool.parameters or {}
    additional = schema.get("additionalProperties", False)
    unknown = sorted(schema.keys() - OF_OBJECTS - ANNOTATIONS)
    if tool.strict and (unknown or not isinstance(additional, bool)):
        raise _not_enforced(where, unknown[0] if unknown else "additionalProperties")
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties = schema.get("properties", {})
    yield from ((key, each, key in names) for key, each in properties.items())
    yield from ((key, True, True) for key in dict.fromkeys(names) if key not in properties)


def _is_open(tool: Tool) -> bool:
    """Return True if there may be arguments that the schema does not name."""
    schema = tool.parameters or {}
    return bool(COMPOSING & set(schema)) and schema.get("additionalProperties", True) is not False


def _tagged_value(style: TagStyle, rule: str, schema: Any, tool: Tool, where: str) -> list[str]:
    """Return rules for a value and what follows it."""
    schema = _resolved(schema, tool)
    types = value_types(schema, tool.parameters)
    if "string" not in types:
        return [f"{rule}: {json_value(schema, tool, where)} {json.dumps(_value_end(style))}"]
    fields = schema if isinstance(schema, Mapping) else {}
    if tool.strict and (unknown := _unenforced(fields, tool, is_text=types == STRING)):
        raise _not_enforced(where, unknown)
    if "const" in fields or isinstance(fields.get("enum"), list):
        values = [fields["const"]] if "const" in fields else fields["enum"]
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
        if any(style.close in text for text in texts):
            raise ToolError(where, f"allows a text with {style.close}, which this model's calls can't hold; change it")
        return [f"{rule}: {' | '.join(json.dumps(text + _value_end(style)) for text in texts)}"]
    return _text(style, rule, fields if types == STRING else {})


def _text(style: TagStyle, rule: str, fields: Mapping[str, Any] | None = None) -> list[str]:
    """Return rules for a text without quotes, and the end of its tag."""
    least, most = ((fields or {}).get(key) for key in ("minLength", "maxLength"))
    bounds = f"{least if type(least) is int else 0},{most if type(most) is int else ''}"
    terminal = f"{rule.upper()}_TEXT"
    length = "*" if bounds == "0," else f"{{{bounds}}}"
    no_end = rf"~/(.|\n)*{re.escape(style.close).replace('/', chr(92) + '/')}(.|\n)*/"
    end = json.dumps(_value_end(style))
    return [f"{rule}[lazy]: {terminal} {end}", rf"{terminal}: /(.|\n){length}/ & {no_end}"]


def _resolved(schema: Any, tool: Tool) -> Any:
    """Return the schema that a mere reference refers to, or else the schema itself."""
    for _ in range(8):
        if not isinstance(schema, Mapping) or schema.keys() - ANNOTATIONS != {"$ref"}:
            break
        schema = resolve(schema["$ref"], tool.parameters)
    return schema


def _unenforced(schema: Mapping[str, Any], tool: Tool, is_text: bool) -> str | None:
    """Return a keyword of the schema of a text, or of texts and other values, that is not enforced; None if all are."""
    unknown = sorted(
        schema.keys() - ANNOTATIONS - (_OF_TEXTS if is_text else {"type", "enum", "const", "anyOf", "oneOf"})
    )
    inner = [_resolved(each, tool) for key in ("anyOf", "oneOf") for each in schema.get(key, ())]
    found = (_unenforced(each, tool, is_text=False) for each in inner if isinstance(each, Mapping))
    return next((keyword for keyword in (*unknown, *found) if keyword is not None), None)


def json_value(schema: Any, tool: Tool, where: str) -> str:
    """Return the part of a rule for a value in JSON; references in its schema refer to that of all arguments.

    Raises ToolError if the tool is strict and can't be enforced.
    """
    part = dict(schema) if isinstance(schema, Mapping) else {}
    if "$ref" in json.dumps(part):
        part = {**_rerooted(part), "$defs": {_REFERENCE_ROOT: _rerooted(tool.parameters)}}
    try:
        closed = enforced_schema(part, is_strict=tool.strict)
    except ValueError as error:
        raise _not_enforceable(where, error) from None
    return f"%json {json.dumps({**closed, 'x-guidance': _style(tool)})}"


def _rerooted(schema: Any) -> Any:
    """Return `schema` with references to parts of the root as `_REFERENCE_ROOT` has them."""
    if isinstance(schema, list):
        return [_rerooted(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/{_REFERENCE_ROOT}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _rerooted(value)
        for key, value in schema.items()
    }


def _style(tool: Tool) -> dict[str, Any]:
    return {**JSON_STYLE, "lenient": not tool.strict}


def _not_written(where: str, key: str) -> ToolError:
    return ToolError(f"{where}.properties", f"has the name {key!r}, which this model's calls can't hold; change it")


def _not_enforceable(where: str, error: ValueError) -> ToolError:
    return ToolError(where, f"cannot be enforced: {error}; or omit strict to ignore unsupported keywords")


def _not_enforced(where: str, keyword: str) -> ToolError:
    return ToolError(
        where,
        f"cannot be enforced: {keyword!r} is not supported in this model's calls; change the schema, or omit strict to "
        "ignore unsupported keywords",
    )
