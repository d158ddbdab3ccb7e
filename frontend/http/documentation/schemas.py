"""JSON schemas of the structs that bodies and answers are, with the ranges in which values are taken."""

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
    """The schemas of types, and the components that they refer to."""

    def __init__(self, types: Iterable[Any]) -> None:
        kinds = list(dict.fromkeys(types))
        found, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE + "{name}")
        self._of = dict(zip(kinds, found, strict=True))
        self.components: dict[str, Schema] = components
        for schema in self.components.values():
            if "description" in schema:
                schema["description"] = inspect.cleandoc(schema["description"])
            if schema.get("additionalProperties") is False:
                schema["additionalProperties"] = {"type": "null"}  # which is as good as left out

    def of(self, kind: Any) -> Schema:
        """The schema of one of the types, most often a reference."""
        return dict(self._of[kind])

    def tell_body(self, kind: type[Body], models: Sequence[str], vocab_size: int) -> None:
        """Tell of a body's fields what they mean, in which range they are taken, and which ones ask for nothing.

        Whole numbers in the lists of a body are token ids.
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
            properties[name] = _refusal(*why)


def _branches(schema: Schema) -> list[Schema]:
    """What a value may be."""
    return list(schema.get("anyOf", [schema]))


def _limit(schema: Schema, limits: tuple[float, float, bool]) -> None:
    """Set the bounds of a number, or of the numbers among what a field may be or list."""
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


def _refusal(harmless: tuple[object, ...], why: str) -> Schema:
    """A field that is known and not supported; beside null only what asks for nothing is taken."""
    return {"enum": [None, *harmless], "description": f"Not supported: {why}.", "x-refused": True}
