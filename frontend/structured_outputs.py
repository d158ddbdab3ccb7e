"""Structured outputs as users give them: checking, and the form that the engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.protocol.messages import STRUCTURED_LENGTHS, StructuredOutputs

__all__ = ["StructuredOutputsParams", "check_structured_outputs", "plain_structured_outputs"]

StructuredOutputsParams = StructuredOutputs  # vLLM's name

_KINDS = "json, regex, choice, grammar or json_object=True"


def plain_structured_outputs(value: Any) -> Any:
    """Return `value` with a JSON schema as text. A mapping of field names becomes a `StructuredOutputs`.

    Any other value is returned as it is. Raises `ValueError` for an unknown field, a field of another type or too long,
    and a schema that is not JSON.
    """
    if isinstance(value, Mapping):
        value = _from_mapping(value)
    if not isinstance(value, StructuredOutputs):
        return value
    for name, most in STRUCTURED_LENGTHS.items():
        most.check(f"structured_outputs.{name}", getattr(value, name))
    if value.json is not None:
        value = msgspec.structs.replace(value, json=_schema_text(value.json))
    try:
        return msgspec.convert(
            [getattr(value, name) for name in StructuredOutputs.__struct_fields__], StructuredOutputs
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"{value!r} has a field of the wrong type: {error}") from None


def _from_mapping(given: Mapping[str, Any]) -> StructuredOutputs:
    known = StructuredOutputs.__struct_fields__
    if unknown := sorted(map(str, set(given).difference(known))):
        raise ValueError(f"structured_outputs has {', '.join(unknown)}; its fields are {', '.join(known)}")
    switches = {name: bool(given.get(name)) for name in ("json_object", "disable_any_whitespace")}  # vLLM's may be None
    return StructuredOutputs(**{**given, **switches})


def check_structured_outputs(value: StructuredOutputs) -> None:
    """Raise `ValueError` unless exactly one constraint is given and is not empty.

    The engine checks the rest when it compiles the grammar.
    """
    kinds = value.kinds
    if len(kinds) != 1:
        given = " and ".join(kinds) or "nothing"
        raise ValueError(f"structured_outputs asks for {given}; give exactly one of {_KINDS}")
    text: Any = getattr(value, kinds[0])
    if text in ("", []) or (kinds[0] == "choice" and not any(text)):
        raise ValueError(f"structured_outputs.{kinds[0]}={text!r} allows no text; give some, or leave it out")
    if value.whitespace_pattern is not None and value.disable_any_whitespace:
        raise ValueError(
            "structured_outputs has a whitespace_pattern and disable_any_whitespace, which allows none; leave one out"
        )
    _check_json_options(value, kinds[0])


def _check_json_options(value: StructuredOutputs, kind: str) -> None:
    for name in ("whitespace_pattern", "disable_any_whitespace"):
        if getattr(value, name) and kind not in ("json", "json_object"):
            raise ValueError(f"structured_outputs.{name} is for JSON and means nothing with {kind}; leave it out")


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text. Properties keep their order, which is that of the answer."""
    wrong = "structured_outputs.json is not a JSON schema:"
    try:
        value = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{wrong} {error}") from None
    STRUCTURED_LENGTHS["json"].check("structured_outputs.json", text)
    if not isinstance(value, dict):
        raise ValueError(f"{wrong} it is a {type(value).__name__}; give an object, or its text")  # noqa: TRY004
    return text
