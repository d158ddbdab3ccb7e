"""Translation of structured outputs into grammars for llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from quire.protocol.grammar.gbnf import lark_of
from quire.protocol.grammar.json_schema import WHITESPACE, enforced_schema
from quire.protocol.grammar.regex_dialect import PYTHON, translate_regex
from quire.protocol.messages import StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ANY_OBJECT = '{"type":"object"}'


def grammar_text(structured: StructuredOutputs) -> str:
    """Return what the client gave, as text."""
    kind = structured.kinds[0]
    if kind == "json_object":
        return _ANY_OBJECT
    given = getattr(structured, kind)
    return given if isinstance(given, str) else msgspec.json.encode(given).decode()


def grammar_source(structured: StructuredOutputs) -> tuple[str, str]:
    """Return the kind and text of the grammar for `Matcher`. Raises ValueError if it cannot be read."""
    # Imported here, since it takes a while to load, and many engines never need it.
    from llguidance import LLMatcher

    kind, text = structured.kinds[0], grammar_text(structured)
    match kind:
        case "regex":
            return "llguidance", str(LLMatcher.grammar_from_regex(translate_regex(text, PYTHON)))
        case "choice":
            choices = (json.dumps(choice, ensure_ascii=False) for choice in structured.choice or ())
            return "lark", "start: " + " | ".join(choices)
        case "grammar":
            return "lark", lark_of(text)
        case _:
            schema = json.dumps(enforced_schema(json.loads(text)))
            return "llguidance", str(LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(structured)))


def _json_options(structured: StructuredOutputs) -> JsonCompileOptions:
    """Return all options, since a schema's own "x-guidance" could make it lenient or slow."""
    if structured.disable_any_whitespace:
        return {"lenient": False, "whitespace_flexible": False}
    given = structured.whitespace_pattern
    pattern = translate_regex(given, PYTHON) if given else WHITESPACE
    return {"lenient": False, "whitespace_flexible": True, "whitespace_pattern": pattern}
