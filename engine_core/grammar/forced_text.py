"""A bound on the texts that grammars force: what may come next is one text only, such as a key of a JSON object.

llguidance reads a forced text to its end at once, on the thread that asks, and keeps some hundred bytes for each of its
characters. A grammar of 300 characters can force one of gigabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_FORCED = 4096  # characters; about 3 ms of the engine's loop
_MAX_TEXT = 1 << 17  # characters of a grammar that is read here
_VALUE = 8  # characters of the longest word that JSON has, or of a number, with what surrounds a value
_FORMAT = 64  # characters of a string of a format, such as uuid
_UNBOUNDED = MAX_FORCED + 1  # sums stay at this, however large they would be


def longest_forced_text(kind: str, text: str) -> int:
    """Return a number of characters that no forced text exceeds; more than `MAX_FORCED` if there may be none.

    `kind` and `text` are those of a grammar for `Matcher`. What is forced at a position is the beginning of every text
    that may follow there, so it is no longer than the shortest one. That is bounded by the sum of what a rule consists
    of, where of alternatives the longest one counts, and of repetitions as many as there must be. Of rules that refer
    to themselves there is no bound. Clients write grammars: whatever is not certain to be read as llguidance reads it
    is taken to have none either.
    """
    if len(text) > _MAX_TEXT:
        return _UNBOUNDED
    try:
        if kind == "lark":
            return _LarkReader(text).grammar().weight()
        (grammar,) = json.loads(text)["grammars"]
        lark = grammar["lark_grammar"]
        return _LarkReader(lark).grammar().weight() if lark else _schema_weight(grammar["json_schema"])
    except Exception:  # noqa: BLE001 - llguidance will say what is wrong with it
        return _UNBOUNDED


def without_forcing(kind: str, text: str) -> tuple[str, str]:
    """Return the kind and text of the same grammar, of which llguidance forces nothing."""
    option = '%llguidance {"no_forcing": true}\n'
    if kind == "lark":
        return kind, f"{text}\n{option}"
    (grammar,) = json.loads(text)["grammars"]
    if grammar["lark_grammar"]:
        return "lark", f"{grammar['lark_grammar']}\n{option}"
    grammars = [{"lark_grammar": f"{option}start: @schema"}, {**grammar, "name": "schema"}]
    return kind, json.dumps({"grammars": grammars})


class _UnknownError(Exception):
    """Nothing is known of a grammar."""


class _Expression:
    """The weight of an expression, whose parts are added from left to right."""

    def __init__(self) -> None:
        self._groups = [[0, 0, 0]]  # the longest alternative, the sum of this one, and its last part besides

    def add(self, weight: int) -> None:
        """Add a part."""
        group = self._groups[-1]
        group[1:] = min(group[1] + group[2], _UNBOUNDED), weight

    def repeat(self, times: int) -> None:
        """Repeat the last part."""
        self._groups[-1][2] = min(self._groups[-1][2] * max(times, 1), _UNBOUNDED)

    def alternate(self) -> None:
        """Begin with another alternative."""
        longest, weight, last = self._groups[-1]
        self._groups[-1][:] = max(longest, weight + last), 0, 0

    def open(self) -> None:
        """Begin with a group."""
        self._groups.append([0, 0, 0])

    def close(self) -> None:
        """End a group, which is a part of what it stands in."""
        if len(self._groups) == 1:
            raise _UnknownError
        self.alternate()
        self.add(self._groups.pop()[0])

    def weight(self) -> int:
        """Return the weight."""
        if len(self._groups) > 1:
            raise _UnknownError
        self.alternate()
        return min(self._groups[0][0], _UNBOUNDED)


class _Rules:
    """The weights of rules, each of which is computed once."""

    def __init__(self) -> None:
        self._known: dict[str, int | None] = {}

    def weight(self, name: str, compute: Callable[[], int]) -> int:
        """Return the weight of a rule."""
        if name not in self._known:
            self._known[name] = None
            self._known[name] = compute()
        weight = self._known[name]
        if weight is None:  # it refers to itself
            raise _UnknownError
        return weight


_REGEX = re.compile(
    r"""
    (?P<open>\((?!\?)|\(\?:)
    | (?P<close>\))
    | (?P<alternate>\|)
    | (?P<repeat>\{(?P<times>[0-9]+)(?:,[0-9]*)?\})
    | (?P<optional>[*+?])
    | (?P<character>
        \\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^0-9pPxuUbBAzQE])
        | \[\^?(?:\\[^pPxuU]|(?!&&|~~|--)[^\]\\\[])+\]
        | [^\\\[\](){}|*+?]
      )
    """,
    re.VERBOSE | re.DOTALL,
)


def _regex_weight(pattern: str) -> int:
    """Return the weight of a pattern without flags, nested classes and the like."""
    expression, position = _Expression(), 0
    while position < len(pattern):
        found = _REGEX.match(pattern, position)
        if found is None:
            raise _UnknownError
        position = found.end()
        if found.lastgroup == "character":
            expression.add(1)
        else:
            _apply(expression, found)
    return expression.weight()


def _apply(expression: _Expression, found: re.Match[str]) -> None:
    """Apply what regular expressions and rules have in common."""
    match found.lastgroup:
        case "open":
            expression.open()
        case "close":
            expression.close()
        case "alternate":
            expression.alternate()
        case "repeat":
            expression.repeat(int(found["times"]))


_ANY = r"/\(\.\|\\n\)"  # any text, of any length or a bounded one
_LARK = re.compile(
    rf"""
    (?P<skipped>\s+|(?://|\#)[^\n]*)
    | (?P<without>{_ANY}(?:\*|\{{0,[0-9]+\}})/\s*&\s*~{_ANY}\*(?:\\/|[\w\s<>=-])*\(\.\|\\n\)\*/(?!\w))
    | (?P<string>"(?:\\.|[^"\\\n])*"i?(?!\w))
    | (?P<regex>/(?P<pattern>(?:\\.|[^/\\\n])+)/[imsu]*(?!\w))
    | (?P<rule>(?P<head>[a-zA-Z_]\w*)(?:\[(?:lazy|capture)\])?\s*:(?!:))
    | (?P<json>%json\s+)
    | (?P<options>%llguidance\s+)
    | (?P<ignore>%ignore\b)
    | (?P<nested>%lark\s*\{{)
    | (?P<end>\}})
    | (?P<name>[a-zA-Z_]\w*)
    | (?P<token><[^<>\s]+>)
    | (?P<repeat>\{{\s*(?P<times>[0-9]+)\s*(?:,\s*[0-9]*\s*)?\}})
    | (?P<optional>[*+?])
    | (?P<alternate>\|)
    | (?P<open>[(\[])
    | (?P<close>[)\]])
    """,
    re.VERBOSE | re.DOTALL,
)
_IGNORED = "%ignore"
_Part = int | re.Match[str]  # of a rule: a weight, or what is yet to be weighed


class _Lark:
    """A grammar in the Lark dialect of llguidance."""

    def __init__(self, bodies: dict[str, list[_Part]]) -> None:
        self._bodies = bodies
        self._rules = _Rules()

    def weight(self) -> int:
        """Return the weight of the grammar, with that of what may be anywhere."""
        return min(self._rule("start") + self._rule(_IGNORED), _UNBOUNDED)

    def _rule(self, name: str) -> int:
        return self._rules.weight(name, lambda: self._body(name))

    def _body(self, name: str) -> int:
        expression = _Expression()
        for part in self._bodies[name]:
            if isinstance(part, int):
                expression.add(part)
            elif part.lastgroup == "name":
                expression.add(self._rule(part["name"]))
            else:
                _apply(expression, part)
        return expression.weight()


class _LarkReader:
    """Reads a grammar, and those that are nested in it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def grammar(self, *, is_nested: bool = False) -> _Lark:
        """Read a grammar to its end."""
        bodies: dict[str, list[_Part]] = {_IGNORED: []}
        body: list[_Part] | None = None
        while self._position < len(self._text):
            found = _LARK.match(self._text, self._position)
            if found is None:
                raise _UnknownError
            self._position = found.end()
            match found.lastgroup:
                case "skipped":
                    pass
                case "options":
                    self._json()
                case "rule" if found["head"] not in bodies:
                    body = bodies[found["head"]] = []
                case "ignore":
                    body = bodies[_IGNORED]
                case "end" if is_nested:
                    return _Lark(bodies)
                case "rule" | "end":
                    raise _UnknownError
                case _ if body is None:
                    raise _UnknownError
                case _:
                    body.append(self._part(found))
        if is_nested:
            raise _UnknownError
        return _Lark(bodies)

    def _part(self, found: re.Match[str]) -> _Part:
        match found.lastgroup:
            case "string" | "token":
                return len(found[0])
            case "regex":
                return _regex_weight(found["pattern"])
            case "without":
                return 0
            case "json":
                return _schema_weight(self._json())
            case "nested":
                return self.grammar(is_nested=True).weight()
        return found

    def _json(self) -> Any:
        found, self._position = json.JSONDecoder().raw_decode(self._text, self._position)
        return found


_ANNOTATIONS = frozenset((
    "$schema", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly", "x-guidance",
))  # fmt: skip
_COMBINED = frozenset(("$ref", "anyOf", "oneOf", "allOf"))  # llguidance merges these with what stands beside them
_KEYWORDS = frozenset((
    "type", "const", "enum", "pattern", "format", "minLength", "maxLength", "properties", "required",
    "additionalProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems",
))  # fmt: skip
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ALL_KEYWORDS = _KEYWORDS | _COMBINED | _ANNOTATIONS | frozenset(_NUMBERS)


def _schema_weight(schema: Any) -> int:
    return min(_Schemas(schema).weight(), _UNBOUNDED)


class _Schemas:
    """The JSON schemas of a document, which refer to each other."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._rules = _Rules()

    def weight(self) -> int:
        """Return the weight of the document."""
        return self._rules.weight("#", lambda: self._schema(self._document))

    def _schema(self, schema: Any) -> int:
        if isinstance(schema, bool):
            return _VALUE if schema else 0
        if not isinstance(schema, dict) or not schema.keys() <= _ALL_KEYWORDS:
            raise _UnknownError
        combined = schema.keys() & _COMBINED
        if combined and len(schema.keys() - _ANNOTATIONS) > 1:
            raise _UnknownError
        weight = _options_weight(schema.get("x-guidance", {}))
        if combined:
            return min(weight + self._combined(schema, combined.pop()), _UNBOUNDED)
        weight += _VALUE + self._string(schema) + self._object(schema) + self._array(schema)
        weight += sum(_literal(schema[name]) for name in _NUMBERS if name in schema)
        if "const" in schema:
            weight += _literal(schema["const"])
        return min(weight + max(map(_literal, schema.get("enum", [])), default=0), _UNBOUNDED)

    def _combined(self, schema: dict[str, Any], keyword: str) -> int:
        if keyword == "$ref":
            return self._reference(schema["$ref"])
        if keyword == "allOf" and len(schema["allOf"]) > 1:
            raise _UnknownError
        return max(map(self._schema, schema[keyword]))

    def _string(self, schema: dict[str, Any]) -> int:
        is_both = "pattern" in schema and "format" in schema
        if is_both or (schema.get("minLength", 0) > 1 and ("pattern" in schema or "format" in schema)):
            raise _UnknownError
        return (_regex_weight(schema["pattern"]) if "pattern" in schema else 0) + _FORMAT * ("format" in schema)

    def _object(self, schema: dict[str, Any]) -> int:
        """Return the weight of all properties that an object must have, and one that it may have."""
        properties, required = schema.get("properties", {}), frozenset(schema.get("required", ()))
        if not required <= properties.keys():
            raise _UnknownError
        weights = {key: _VALUE + _literal(key) + self._schema(value) for key, value in properties.items()}
        optional = [weight for key, weight in weights.items() if key not in required]
        optional.append(self._schema(schema.get("additionalProperties", False)))
        return sum(weights[key] for key in required) + max(optional)

    def _array(self, schema: dict[str, Any]) -> int:
        first = sum(map(self._schema, schema.get("prefixItems", ())))
        return first + max(1, int(schema.get("minItems", 0))) * self._schema(schema.get("items", False))

    def _reference(self, reference: str) -> int:
        root, *keys = reference.split("/")
        if root != "#" or "%" in reference or "~" in reference:
            raise _UnknownError
        found = self._document
        for key in keys:
            found = found[key]
        return self._rules.weight(reference, lambda: self._schema(found))


def _literal(value: Any) -> int:
    """Return the number of characters of a value as JSON; there may be another space after each comma and colon."""
    text = json.dumps(value)
    if re.search(r"\d[eE]", re.sub(r'"(?:\\.|[^"\\])*"', "", text)):  # llguidance writes 1e300 with all its digits
        raise _UnknownError
    return len(text)


def _options_weight(options: Mapping[str, Any]) -> int:
    """Return the weight of the blanks that may be anywhere in a text."""
    if any(len(options.get(name, "")) > 2 for name in ("item_separator", "key_separator")):  # such as ", "
        raise _UnknownError
    return _regex_weight(options.get("whitespace_pattern") or "")
