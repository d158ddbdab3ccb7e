"""JSON schemas of the structs of bodies and answers, with the accepted ranges of values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.frontend.http.documentation.descriptions import DESCRIPTIONS
from quire.frontend.http.openai.fields import RANGES
from quire.frontend.http.transport.bodies import Body

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/"
_NUMBERS = ("integer", "number")


class Schemas:
    """The schemas of types, and the components to which they refer."""

    def __init__(self, types: Iterable[Any]) -> None:
        kinds = list(dict.fromkeys(types))
        found, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE + "{name}")
        self._of = dict(zip(kinds, found, strict=True))
        self.components: dict[str, Schema] = components
        for schema in self.components.values():
            if "description" in schema:
                schema["description"] = inspect.cleandoc(schema["description"])
            if schema.get("additionalProperties") is False:
                schema["additionalProperties"] = {"type": "null"}  # null is the same as leaving a field out

    def of(self, kind: Any) -> Schema:
        """Return the schema of one of the types, usually a reference."""
        return dict(self._of[kind])

    def describe_body(self, kind: type[Body], models: Sequence[str], vocab_size: int) -> None:
        """Add to a body's fields their meaning and range, and add the fields that are not supported.

        Integers in the lists of a body are token ids.
        """
        component = self.components[self._of[kind]["$ref"].removeprefix(_REFERENCE)]
        properties = component["properties"]
        for name, schema in properties.items():
            if name in DESCRIPTIONS:
                schema.setdefault("description", DESCRIPTIONS[name])
            if name in RANGES:
                _limit(schema, RANGES[name])
            for branch in _branches(schema):
                if branch.get("type") == "array":
                    _limit(branch["items"], (0, vocab_size - 1, True))
        if "model" in properties:
            properties["model"] = {"enum": [*models, None], "description": DESCRIPTIONS["model"]}
        for name, why in sorted(kind.refused.items()):
            properties[name] = _unsupported(*why)


def _branches(schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema."""
    return list(schema.get("anyOf", [schema]))


def _limit(schema: Schema, limits: tuple[float, float, bool]) -> None:
    """Set the bounds of a number, also where it is an alternative or an item of a list."""
    low, high, closed = limits
    for branch in _branches(schema):
        if branch.get("type") == "array":
            _limit(branch["items"], limits)
        if branch.get("type") not in _NUMBERS:
            continue
        if math.isfinite(low):
            branch.setdefault("minimum" if closed else "exclusiveMinimum", low)
        if math.isfinite(high):
            branch.setdefault("maximum", high)


def _unsupported(harmless: tuple[object, ...], why: str) -> Schema:
    """Return the schema of a field that is not supported: only null and values that change nothing are accepted."""
    return {"enum": [None, *harmless], "description": f"Not supported: {why}.", "x-refused": True}
