"""Rules of a grammar for the arguments of a call in Gemma 4's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.frontend.text.chat.argument_rules import ANNOTATIONS, OF_OBJECTS, json_arguments, json_value, separated
from quire.frontend.text.chat.gemma4_call_reader import QUOTE
from quire.frontend.text.chat.tools import Tool

_KEY = re.compile(r'[^<>,:\[\]{}"\s]{1,256}')


def gemma4_arguments(rule: str, tool: Tool, where: str) -> list[str]:
    """Return the rules of `{KEY:VALUE,...}` with keys in alphabetical order, as Gemma 4 sees them in its prompts.

    They refer to `quote`, the mark around texts, and to `quoted`, a text and that mark. What the notation cannot
    express is written in JSON, which the parser reads too. Raises ToolError as `json_arguments` does.
    """
    if not _is_plain_object(tool.parameters or {"type": "object"}):
        return json_arguments(rule, tool, where)
    return _ArgumentRules(tool).of_object(rule, tool.parameters or {}, where)


class _ArgumentRules:
    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    def of_object(self, rule: str, schema: Mapping[str, Any], where: str) -> list[str]:
        """Return rules for an object, the first of which is named `rule`."""
        required = schema.get("required", ())
        items, rules = [], list[str]()
        for index, (key, each) in enumerate(sorted(schema.get("properties", {}).items(), key=_alphabetical)):
            item = f"{rule}_{index}"
            items.append((item, key in required))
            rules.append(f"{item}: {json.dumps(key + ':', ensure_ascii=False)} {item}_value")
            rules += self._of_value(f"{item}_value", each, f"{where}.properties.{key}")
        return [*separated(rule, items, comma=",", around='"{{" ({}) "}}"'), *rules]

    def _of_value(self, rule: str, schema: Any, where: str) -> list[str]:
        fields = schema if isinstance(schema, Mapping) else {}
        kind, keywords = fields.get("type"), fields.keys() - ANNOTATIONS
        if kind == "object" and fields.get("properties") and _is_plain_object(fields):
            return self.of_object(rule, fields, where)
        if kind == "array" and keywords == {"type", "items"}:
            items = self._of_value(f"{rule}_item", fields["items"], f"{where}.items")
            return [f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"', *items]
        if kind == "string" and keywords == {"type"}:
            return [f"{rule}: quote quoted"]
        if kind in ("string", None) and keywords <= {"type", "enum"} and _are_texts(fields.get("enum")):
            return [f"{rule}: {' | '.join(map(_constant, fields['enum']))}"]
        return [f"{rule}: {json_value(schema, self._tool, where)}"]


def _is_plain_object(schema: Mapping[str, Any]) -> bool:
    """Return True if the notation can express all that the schema allows."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        schema.keys() <= OF_OBJECTS | ANNOTATIONS
        and schema.get("additionalProperties", False) is False
        and isinstance(properties, Mapping)
        and all(_KEY.fullmatch(key) for key in properties)
        and isinstance(required, list)
        and all(isinstance(key, str) and key in properties for key in required)
    )


def _alphabetical(item: tuple[str, Any]) -> str:
    return item[0].lower()


def _are_texts(values: Any) -> bool:
    if not isinstance(values, list) or not values:
        return False
    return all(isinstance(value, str) and QUOTE not in value for value in values)


def _constant(text: str) -> str:
    """Return the right side of a rule for a text between its marks."""
    return f"quote {json.dumps(text, ensure_ascii=False)} quote" if text else "quote quote"
