"""A bound on the texts that grammars force: what may come next is one text only, such as a key of a JSON object.

llguidance reads a forced text to its end at once, on the thread that asks, and keeps some hundred bytes for each of its
characters. A grammar of 300 characters can force one of gigabytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

from quire.protocol.grammar.json_schema import WHITESPACE

MAX_FORCED = 4096  # characters; about 3 ms of the engine's loop
_MAX_TEXT = 1 << 17  # characters of a grammar that is read here
_VALUE = 8  # characters of the longest word that JSON has, or of a number, with what surrounds a value
_FORMAT = 64  # characters of a string of a format, such as uuid
_UNBOUNDED = MAX_FORCED + 1  # sums stay at this, however large they would be


def longest_forced_text(kind: str, text: str) -> int:
    """Return a number of characters that no forced text exceeds; more than `MAX_FORCED` if there may be none.

    `kind` and `text` are those of a grammar for `Matcher`. What is forced is a path on which nothing branches. So of a
    sequence all parts count, and of alternatives the longest. A repetition counts as often as it has to be, if in each
    turn there is a choice of characters, else as often as it may be: that a text goes on with what it repeats, as in
    `/a+/ "a"`, leaves no way out. Recursive rules have no bound. Clients write grammars: whatever is not certain to be
    read as llguidance reads it is taken to have none either.
    """
    if len(text) > _MAX_TEXT:
        return _UNBOUNDED
    try:
        grammar = {"lark_grammar": text} if kind == "lark" else json.loads(text)["grammars"][0]
        lark = grammar["lark_grammar"]
        return (_LarkReader(lark).grammar().weight() if lark else _schema_weight(grammar["json_schema"]))[0]
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


_Weight = tuple[int, bool]
"""The characters of a part, and whether there is a choice for one of them, whatever else is chosen."""


class _Group:
    """Alternatives, the last of which is not complete."""

    def __init__(self) -> None:
        self._longest, self._all_branch = 0, True
        self._weight, self._branches = 0, False
        self._last: _Weight = 0, False

    def add(self, weight: _Weight) -> None:
        """Add a part."""
        self._weight = min(self._weight + self._last[0], _UNBOUNDED)
        self._branches |= self._last[1]
        self._last = weight

    def repeat(self, least: int, most: float) -> None:
        """Repeat the last part."""
        weight, branches = self._last
        times = max(least, 1) if branches else most
        self._last = int(min(weight * times, _UNBOUNDED)) if weight else 0, branches and least > 0

    def alternate(self) -> None:
        """Begin with another alternative."""
        self.add((0, False))
        self._longest, self._all_branch = max(self._longest, self._weight), self._all_branch and self._branches
        self._weight, self._branches = 0, False

    def end(self) -> _Weight:
        """Return the weight of all alternatives."""
        self.alternate()
        return self._longest, self._all_branch


class _Expression:
    """The weight of an expression, whose parts are added from left to right."""

    def __init__(self) -> None:
        self._groups = [_Group()]

    def add(self, weight: _Weight) -> None:
        """Add a part."""
        self._groups[-1].add(weight)

    def apply(self, found: re.Match[str]) -> None:
        """Add what regular expressions and rules have in common."""
        match found.lastgroup:
            case "open":
                self._groups.append(_Group())
            case "close":
                weight = self._groups.pop().end()
                self._groups[-1].add(weight)
            case "alternate":
                self._groups[-1].alternate()
            case "optional":
                self._groups[-1].repeat(found[0] == "+", 1 if found[0] == "?" else math.inf)
            case "repeat":
                least, most = int(found["least"]), found["most"]
                self._groups[-1].repeat(least, least if most is None else int(most) if most.strip() else math.inf)

    def weight(self) -> _Weight:
        """Return the weight."""
        (group,) = self._groups
        return group.end()


class _Weights:
    """The weights of rules, each of which is computed once."""

    def __init__(self) -> None:
        self._known: dict[str, _Weight | None] = {}

    def weight(self, name: str, compute: Callable[[], _Weight]) -> _Weight:
        """Return the weight of a rule."""
        if name not in self._known:
            self._known[name] = None
            self._known[name] = compute()
        weight = self._known[name]
        if weight is None:  # the rule is recursive
            raise _UnknownError
        return weight


_REGEX = re.compile(
    r"""
    (?P<any>\(\.\|\\n\)|\.|\\[dDwWsS])
    | (?P<open>\((?!\?)|\(\?:)
    | (?P<close>\))
    | (?P<alternate>\|)
    | (?P<repeat>\{(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?\})
    | (?P<optional>[*+?])
    | (?P<none_of>\[\^(?:\\[dwsnrtf\W]|(?!&&|~~|--)[^\]\\\[\u0100-\U0010ffff])+\])
    | (?P<one_of>\[(?!\^)(?:\\[dwsnrtf\W]|(?!&&|~~|--)[^\]\\\[])+\])
    | (?P<character>\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[nrtf]|[^\w<>])|[^\\\[\](){}|*+?])
    """,
    re.VERBOSE | re.DOTALL,
)


def _regex_weight(pattern: str) -> _Weight:
    """Return the weight of a pattern without flags, nested classes and the like."""
    expression, position = _Expression(), 0
    while position < len(pattern):
        found = _REGEX.match(pattern, position)
        if found is None:
            raise _UnknownError
        position = found.end()
        match found.lastgroup:
            case "any" | "none_of":
                expression.add((1, True))
            case "one_of":
                expression.add((1, _has_many(found[0][1:-1])))
            case "character":
                expression.add((1, False))
            case _:
                expression.apply(found)
    return expression.weight()


def _has_many(characters: str) -> bool:
    """Return True if a class certainly has several characters."""
    found = re.findall(r"\\.|[^\\]", characters, re.DOTALL)
    parts = {part if part[-1].isalnum() else part[-1] for part in found}
    return len(parts - {"-"}) > 1 or not parts.isdisjoint((r"\d", r"\w", r"\s"))


_ANY_TEXT = r"/\(\.\|\\n\)(?:\*|\{0,[1-9][0-9]*\})/"
_RULE_ENDS = r"(?=\s*(?:\Z|\}|\w+(?:\[lazy\])?\s*:))"
_LARK = re.compile(
    rf"""
    (?P<skipped>\s+|(?://|\#)[^\n]*)
    | (?P<without>{_ANY_TEXT}\s*&\s*~/\(\.\|\\n\)\*(?:\\/|[\w\s<>=-])+\(\.\|\\n\)\*/{_RULE_ENDS})
    | (?P<any_text>{_ANY_TEXT}{_RULE_ENDS})
    | (?P<string>"(?:\\.|[^"\\\n])*"i?(?!\w))
    | (?P<regex>/(?P<pattern>(?:\\.|[^/\\\n])+)/[imsu]*(?!\w))
    | (?P<rule>(?P<head>[a-zA-Z_]\w*)(?P<lazy>\[lazy\])?\s*:(?!:))
    | (?P<json>%json\s+)
    | (?P<options>%llguidance\s+)
    | (?P<nested>%lark\s*\{{)
    | (?P<end>\}})
    | (?P<name>[a-zA-Z_]\w*)
    | (?P<token><[^<>\s]+>)
    | (?P<repeat>\{{\s*(?P<least>[0-9]+)\s*(?:,\s*(?P<most>[0-9]*)\s*)?\}})
    | (?P<optional>[*+?])
    | (?P<alternate>\|)
    | (?P<open>\()
    | (?P<close>\))
    """,
    re.VERBOSE | re.DOTALL,
)
_Part = _Weight | re.Match[str]  # of a rule: what has a weight, or is yet to be weighed


class _Lark:
    """A grammar in the Lark dialect of llguidance."""

    def __init__(self) -> None:
        self._bodies: dict[str, list[_Part]] = {}
        self._lazy: set[str] = set()
        self._texts: set[str] = set()  # rules of any text, or of any without certain words
        self._weights = _Weights()

    def begin(self, name: str, *, is_lazy: bool) -> list[_Part]:
        """Return the body of a new rule, to be filled."""
        if name in self._bodies:
            raise _UnknownError
        if is_lazy:
            self._lazy.add(name)
        return self._bodies.setdefault(name, [])

    def note_text(self) -> None:
        """Note that the rule begun last is any text."""
        self._texts.add(next(reversed(self._bodies)))

    def weight(self) -> _Weight:
        """Return the weight of the grammar."""
        return self._rule("start")

    def _rule(self, name: str) -> _Weight:
        return self._weights.weight(name, lambda: self._body(name))

    def _body(self, name: str) -> _Weight:
        if name in self._texts:  # a choice of all characters and of what follows
            return 0, True
        expression = _Expression()
        for part in self._bodies[name]:
            if isinstance(part, tuple):
                expression.add(part)
            elif part.lastgroup == "name":
                expression.add(self._rule(part["name"]))
            else:
                expression.apply(part)
        weight, branches = expression.weight()
        if name not in self._lazy:
            return weight, branches
        first = self._bodies[name][0]  # any text, up to what follows
        if isinstance(first, tuple) or first.lastgroup != "name" or first["name"] not in self._texts:
            raise _UnknownError
        return weight, True


class _LarkReader:
    """Reads a grammar, and those that are nested in it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def grammar(self, *, is_nested: bool = False) -> _Lark:
        """Read a grammar to its end."""
        grammar = _Lark()
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
                case "rule":
                    body = grammar.begin(found["head"], is_lazy=found["lazy"] is not None)
                case "end" if is_nested:
                    return grammar
                case _ if body is None:
                    raise _UnknownError
                case "any_text" | "without" if not body:
                    grammar.note_text()
                case _:
                    body.append(self._part(found))
        if is_nested:
            raise _UnknownError
        return grammar

    def _part(self, found: re.Match[str]) -> _Part:
        match found.lastgroup:
            case "string" | "token":
                return len(found[0]), False
            case "regex":
                return _regex_weight(found["pattern"])
            case "json":
                return _schema_weight(self._json())
            case "nested":
                return self.grammar(is_nested=True).weight()
            case "end" | "without" | "any_text":
                raise _UnknownError
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


def _schema_weight(schema: Any) -> _Weight:
    return _Schemas(schema).weight()


class _Schemas:
    """The JSON schemas of a document, which refer to each other.

    Values are followed by one of several characters, so that repetitions in them leave a choice.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._weights = _Weights()

    def weight(self) -> _Weight:
        """Return the weight of the document."""
        return self._weights.weight("#", lambda: self._schema(self._document))

    def _schema(self, schema: Any) -> _Weight:
        if schema is True:
            return _VALUE, True
        if schema is False:
            return 0, False
        if not isinstance(schema, dict) or not schema.keys() <= _ALL_KEYWORDS:
            raise _UnknownError
        _check_options(schema.get("x-guidance", {}))
        kept = schema.keys() - _ANNOTATIONS
        if kept.isdisjoint(_COMBINED):
            return self._value(schema, kept)
        if len(kept) > 1:
            raise _UnknownError
        [keyword] = kept
        if keyword == "$ref":
            return self._reference(schema["$ref"])
        if keyword == "allOf" and len(schema["allOf"]) > 1:
            raise _UnknownError
        weights = list(map(self._schema, schema[keyword]))
        return max(weight for weight, _ in weights), all(branches for _, branches in weights)

    def _value(self, schema: dict[str, Any], keywords: Set[str]) -> _Weight:
        weight, branches = self._object(schema)
        weight += _VALUE + self._string(schema) + self._array(schema)
        weight += sum(_literal(schema[name]) for name in _NUMBERS if name in schema)
        weight += _literal(schema["const"]) if "const" in schema else 0
        weight += max(map(_literal, schema.get("enum", [])), default=0)
        return min(weight, _UNBOUNDED), branches or _has_choice(schema, keywords)

    def _string(self, schema: dict[str, Any]) -> int:
        is_both = "pattern" in schema and "format" in schema
        if is_both or (schema.get("minLength", 0) > 1 and ("pattern" in schema or "format" in schema)):
            raise _UnknownError
        return _regex_weight(schema["pattern"])[0] if "pattern" in schema else _FORMAT * ("format" in schema)

    def _object(self, schema: dict[str, Any]) -> _Weight:
        """Return the weight of all properties that an object must have, and one that it may have."""
        properties, required = schema.get("properties", {}), frozenset(schema.get("required", ()))
        if not required <= properties.keys():
            raise _UnknownError
        values = {key: self._schema(value) for key, value in properties.items()}
        weights = {key: _VALUE + _literal(key) + weight for key, (weight, _) in values.items()}
        optional = [weight for key, weight in weights.items() if key not in required]
        optional.append(self._schema(schema.get("additionalProperties", False))[0])
        branches = schema.get("type") == "object" and any(values[key][1] for key in required)
        return sum(weights[key] for key in required) + max(optional), branches

    def _array(self, schema: dict[str, Any]) -> int:
        first = sum(self._schema(item)[0] for item in schema.get("prefixItems", ()))
        return first + max(1, int(schema.get("minItems", 0))) * self._schema(schema.get("items", False))[0]

    def _reference(self, reference: str) -> _Weight:
        root, *keys = reference.split("/")
        if root != "#" or "%" in reference or "~" in reference:
            raise _UnknownError
        found = self._document
        for key in keys:
            found = found[key]
        return self._weights.weight(reference, lambda: self._schema(found))


def _has_choice(schema: dict[str, Any], keywords: Set[str]) -> bool:
    """Return True if there is certainly a choice of values, other than of objects and arrays."""
    kind = schema.get("type")
    if keywords <= {"type", "enum"} and "enum" in keywords:
        return len({value for value in schema["enum"] if isinstance(value, str)}) > 1 and kind in (None, "string")
    if isinstance(kind, list):
        return keywords == {"type"} and len(set(kind)) > 1
    if kind in ("integer", "number"):
        return keywords <= {"type", "minimum", "maximum"} and schema.get("minimum", 0) + 1 < schema.get("maximum", 9)
    if kind == "string":
        return keywords <= {"type", "maxLength"} and schema.get("maxLength", 1) > 0
    return kind == "boolean" and keywords == {"type"}


def _literal(value: Any) -> int:
    """Return the number of characters of a value as JSON."""
    text = json.dumps(value)
    if re.search(r"\d[eE]", re.sub(r'"(?:\\.|[^"\\])*"', "", text)):  # llguidance writes 1e300 with all its digits
        raise _UnknownError
    return len(text)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise _UnknownError if what separates the parts of a text may be forced."""
    separators = (options.get("item_separator", ","), options.get("key_separator", ":"))
    if options.get("whitespace_pattern") not in (None, WHITESPACE) or any(len(each) > 2 for each in separators):
        raise _UnknownError
