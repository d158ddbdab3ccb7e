"""What an answer must be, as a part of a larger grammar, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re
from typing import Any

from quire.frontend.errors import RequestError
from quire.protocol.messages import StructuredOutputs

# As the engine has it where the schema is all there is: bounded, since a small model may write blanks for ever.
WHITESPACE = r"[ ]{1,2}|\r?\n[ \t]{0,16}"


def answer_rule(structured: StructuredOutputs) -> str:
    """The right side of a rule for the texts that `structured` allows, which asks for exactly one thing.

    Raises `RequestError` for a grammar that is neither Lark nor GBNF, as the engine does.
    """
    match structured.kinds[0]:
        case "regex":
            return _regex_rule(structured.regex or "")
        case "choice":
            return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choice or ())
        case "grammar":
            return f"%lark {{\n{_lark(structured.grammar or '')}\n}}"
        case _:
            return f"%json {json.dumps(_schema(structured))}"


def _regex_rule(pattern: str) -> str:
    """The pattern between slashes, which it must not end itself."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern) + "/"


def _lark(grammar: str) -> str:
    # Here, since it takes a while to load, and few need it.
    from llguidance import gbnf_to_lark

    try:
        return gbnf_to_lark.any_to_lark(grammar)
    except Exception as error:  # noqa: BLE001 - it raises plain ones
        raise RequestError(
            f"structured_outputs.grammar can't be used: it is neither Lark nor GBNF that can be read: {error}"
        ) from None


def _schema(structured: StructuredOutputs) -> dict[str, Any]:
    given = structured.json if structured.json is not None else {"type": "object"}
    schema = json.loads(given) if isinstance(given, str) else given
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": not structured.disable_any_whitespace}
    if not structured.disable_any_whitespace:
        options["whitespace_pattern"] = structured.whitespace_pattern or WHITESPACE
    return {**schema, "x-guidance": options}
