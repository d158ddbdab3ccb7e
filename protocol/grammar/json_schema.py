"""JSON schemas of clients as llguidance is to enforce them: objects closed, patterns in its dialect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from quire.protocol.grammar.regex_dialect import ECMA, translate_regex

WHITESPACE = r"[ ]{1,2}|\r?\n[ \t]{0,16}"
"""What may stand between two tokens, once; bounded, since a small model may write blanks without end."""

_MAX_PARTS = 5000  # of combined schemas, which take some 10 ms
_MAX_OPTIONAL = 500  # properties of an object that requires none; llguidance fails where one of more may come
_VALUES = {"const", "enum", "default", "examples", "required", "x-guidance"}  # no schemas
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # schemas by their names
_COMBINING = ("allOf", "anyOf", "oneOf")
_OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}


def enforced_schema(schema: Mapping[str, Any], *, is_strict: bool = True) -> dict[str, Any]:
    """Return the schema with its objects closed, and its patterns as llguidance reads them.

    An object that names `properties` has no others, unless `additionalProperties` allows them: a model that may invent
    properties does so without end. Where schemas are combined, their properties are together those of the object.
    Raises ValueError for what can't be enforced; if not `is_strict`, it is left out.
    """
    try:
        return _Closing(schema, is_strict).schema()
    except RecursionError:
        raise ValueError(
            "its schemas are nested, or lead to others, beyond the recursion limit; make the chains shorter"
        ) from None


@dataclass
class _Object:
    """The properties of an object, from all schemas that describe it."""

    names: dict[str, None] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    fewest: int = 0
    has_properties: bool = False
    has_patterns: bool = False
    is_combined: bool = False
    others: list[Any] = field(default_factory=list)  # `additionalProperties` and `unevaluatedProperties` of each schema

    @property
    def is_to_close(self) -> bool:
        """True if it names `properties` and says nothing of others, which it does not need either."""
        if not self.has_properties or self.others or (self.is_combined and self.has_patterns):
            return False
        return self.has_patterns or self.fewest <= len(self.names | self.required)

    @property
    def may_repeat(self) -> bool:
        """True if a property that is not listed may come twice and count as one too many."""
        is_closed = False in self.others and not self.has_patterns
        return self.fewest - len(self.required) > 1 and not is_closed and not self.is_to_close


class _Closing:
    """The closing of one schema."""

    def __init__(self, root: Mapping[str, Any], is_strict: bool) -> None:
        self._root = root
        self._is_strict = is_strict
        self._num_parts = 0
        self._num_copying = 0  # of nested definitions
        self._opened: dict[str, str] = {}  # the names of open definitions, by the references to the closed ones
        self._definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        """Return the closed schema."""
        closed: dict[str, Any] = self._closed(self._root)
        if not self._definitions:
            return closed
        return {**closed, "$defs": {**_definitions(closed, "$defs"), **self._definitions}}

    def _closed(self, schema: Any) -> Any:
        """Return a schema with all its objects closed."""
        if isinstance(schema, list):
            return [self._closed(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        if self._num_copying:
            self._count()
        num_parts = _num_parts(schema)
        if num_parts == 0 or (num_parts == 1 and _OF_OBJECTS.isdisjoint(schema)):
            return self._inner(schema)  # of other types, or only a reference or alternatives, each with its own objects
        found = _Object(is_combined=num_parts > 1)
        self._find(schema, found, set(), is_certain=True)
        opened = self._open(schema) if found.is_combined else self._inner(schema)
        return self._completed(opened, found)

    def _inner(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a schema with the objects within it closed, and its own as it is."""
        return {key: each for key, value in schema.items() for key, each in self._keyword(key, value)}

    def _keyword(self, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        if key == "pattern" and isinstance(value, str):
            if (translated := self._pattern(value)) is not None:
                yield key, translated
        elif key == "patternProperties" and isinstance(value, Mapping):
            patterns = ((self._pattern(pattern), each) for pattern, each in value.items())
            yield key, {pattern: self._closed(each) for pattern, each in patterns if pattern is not None}
        elif key in _BY_NAME and isinstance(value, Mapping):
            yield key, {name: self._closed(each) for name, each in value.items()}
        else:
            yield key, value if key in _VALUES else self._closed(value)

    def _pattern(self, pattern: str) -> str | None:
        try:
            return translate_regex(pattern, ECMA)
        except ValueError:
            if self._is_strict:
                raise
            return None

    def _open(self, schema: Any) -> Any:
        """Return a part of an object, which itself stays open: other parts name properties of the same object."""
        if not isinstance(schema, Mapping):
            return schema
        parts = {key: schema[key] for key in _COMBINING if isinstance(schema.get(key), list)}
        opened = self._inner({key: value for key, value in schema.items() if key not in parts})
        opened |= {key: [self._open(each) for each in value] for key, value in parts.items()}
        if (target := self._target(schema)) is not None:
            opened["$ref"] = self._open_reference(schema["$ref"], target)
        return opened

    def _open_reference(self, reference: str, target: Any) -> str:
        """Return a reference to an open copy: elsewhere the definition may be an object of its own."""
        if reference not in self._opened:
            known = _definitions(self._root, "$defs")
            name = f"open_{len(self._opened)}"
            while name in known:
                name += "_"
            self._opened[reference] = f"#/$defs/{name}"
            self._num_copying += 1
            self._definitions[name] = self._open(target)
            self._num_copying -= 1
        return self._opened[reference]

    def _find(self, schema: Any, found: _Object, seen: set[str], *, is_certain: bool) -> None:
        """Add what a part of an object says; `is_certain` if no alternative may take its place."""
        if found.is_combined:
            self._count()
        if not isinstance(schema, Mapping):
            return
        if isinstance(properties := schema.get("properties"), Mapping):
            found.has_properties = True
            found.names.update(dict.fromkeys(properties))
        if is_certain and isinstance(required := schema.get("required"), list):
            found.required.update(dict.fromkeys(name for name in required if isinstance(name, str)))
        types = schema.get("type", "object")
        may_be_object = types == "object" or (isinstance(types, list) and "object" in types)
        if may_be_object and isinstance(fewest := schema.get("minProperties"), int):
            found.fewest = max(found.fewest, fewest)
        found.has_patterns |= bool(schema.get("patternProperties"))
        found.others += [schema[key] for key in ("additionalProperties", "unevaluatedProperties") if key in schema]
        for key in _COMBINING:
            parts = schema[key] if isinstance(schema.get(key), list) else []
            for part in parts:
                self._find(part, found, seen, is_certain=is_certain and (key == "allOf" or len(parts) == 1))
        target = self._target(schema)
        if found.is_combined and target is None and not str(schema.get("$ref", "#/")).startswith("#/"):
            raise ValueError(
                f"$ref={schema['$ref']!r} can't be combined with other schemas, since it is no path of this one; write "
                "the path, such as '#/$defs/name'"
            )
        if target is not None and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            self._find(target, found, seen, is_certain=is_certain)

    def _count(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ValueError(
                f"it combines schemas (allOf, anyOf, oneOf, $ref) more than {_MAX_PARTS} times in all; combine fewer, "
                "or say in each object which additionalProperties it has"
            )

    def _completed(self, schema: dict[str, Any], found: _Object) -> dict[str, Any]:
        """Return the schema of an object, closed or checked."""
        if not found.is_combined and not found.required:
            num_optional = sum(each is not False for each in _definitions(schema, "properties").values())
            if num_optional > _MAX_OPTIONAL:
                return self._too_many_optional(schema, num_optional)
        if found.is_to_close:
            own = _definitions(schema, "properties")
            others = {} if found.has_patterns else found.names | found.required
            named = {**own, **{name: True for name in others if name not in own}}
            return {**schema, "properties": named, "additionalProperties": False}
        if not found.may_repeat:
            return schema
        if not self._is_strict:
            return {key: value for key, value in schema.items() if key != "minProperties"}
        num_required = len(found.required)
        raise ValueError(
            f"minProperties={found.fewest} can't be enforced for an object with {num_required} required properties "
            "whose others are not listed in 'properties', since one of these could come twice; list and require more, "
            f"or lower minProperties to {num_required + 1} or less"
        )

    def _too_many_optional(self, schema: dict[str, Any], num_optional: int) -> dict[str, Any]:
        if not self._is_strict:
            return {key: value for key, value in schema.items() if key not in _OF_OBJECTS}
        raise ValueError(
            f"an object has {num_optional} properties and requires none, and {_MAX_OPTIONAL} of such can be enforced; "
            "require some of them, or have fewer"
        )

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """Return the part of the schema that `$ref` names; None if there is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: Any = self._root
        for step in reference.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                return None
        return found


def _num_parts(schema: Mapping[str, Any]) -> int:
    """Return the number of schemas that together describe the object that a schema allows."""
    num_parts = int(not _OF_OBJECTS.isdisjoint(schema)) + ("$ref" in schema) + ("anyOf" in schema) + ("oneOf" in schema)
    return num_parts + (len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0)


def _definitions(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    """Return the schemas by their names of a keyword; none if it has another form, which the library rejects."""
    found = schema.get(keyword)
    return found if isinstance(found, Mapping) else {}
