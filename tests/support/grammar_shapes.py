"""Grammars by structure: definitions that refer to each other in chains, fans, cycles and webs, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from quire.protocol.messages import StructuredOutputs

Graph = list[list[int]]
"""For each definition, those that it refers to. The first one is where a text starts."""


def _chain(size: int, _random: Random) -> Graph:
    return [[index + 1] for index in range(size - 1)] + [[]]


def _doubled(size: int, _random: Random) -> Graph:
    return [[index + 1, index + 1] for index in range(size - 1)] + [[]]


def _fan(size: int, _random: Random) -> Graph:
    return [list(range(1, size)), *([] for _ in range(size - 1))]


def _cycle(size: int, _random: Random) -> Graph:
    return [[(index + 1) % size] for index in range(size)]


def _web(size: int, random: Random) -> Graph:
    return [[random.randrange(size) for _ in range(random.choice((0, 1, 1, 2, 3)))] for _ in range(size)]


def _forward_web(size: int, random: Random) -> Graph:
    """Return a web without cycles, which is deep if it is large."""
    near = [[min(index + random.randint(1, 3), size - 1) for _ in range(random.randint(1, 3))] for index in range(size)]
    return [*near[:-1], []]


SHAPES: dict[str, Callable[[int, Random], Graph]] = {
    "chain": _chain, "doubled": _doubled, "fan": _fan, "cycle": _cycle, "web": _web, "forward web": _forward_web,
}  # fmt: skip

Schema = dict[str, Any]


def _in_any_of(refs: list[Schema]) -> Schema:
    return {"anyOf": [*refs, {"type": "string"}]}


def _in_properties(refs: list[Schema]) -> Schema:
    names = [f"p{index}" for index in range(len(refs))]
    properties = dict(zip(names, refs, strict=True))
    return {"type": "object", "properties": properties, "required": names[:1], "additionalProperties": False}


_IN_SCHEMA: dict[str, Callable[[list[Schema]], Schema]] = {
    "$ref": lambda refs: refs[0] if refs else {"type": "string"},
    "allOf": lambda refs: {"allOf": refs} if refs else {"type": "string"},
    "anyOf": _in_any_of,
    "oneOf": lambda refs: {"oneOf": [*refs, {"type": "null"}]},
    "properties": _in_properties,
    "items": lambda refs: {"type": "array", "items": refs[0] if refs else {"type": "null"}, "prefixItems": refs[1:]},
    "additional": lambda refs: {"type": "object", "additionalProperties": refs[0] if refs else False},
}
_IN_RULES: dict[str, tuple[str, str, Callable[[Sequence[str]], str]]] = {  # first line, arrow, what a rule says
    "lark sequence": ("start: r0\n", ": ", lambda names: " ".join(names) or '"x"'),
    "lark texts": ("start: r0\n", ": ", lambda names: " ".join(f'"a" {name}' for name in names) or '"x"'),
    "lark choice": ("start: r0\n", ": ", lambda names: " | ".join([*names, " ".join(names) or '"y"', '"x"'])),
    "lark repeated": ("start: r0\n", ": ", lambda names: "".join(f"({name})* " for name in names) + '"x"'),
    "lark terminals": ("start: R0\n", ": ", lambda names: " ".join(f'"a" {name}' for name in names) or '"x"'),
    "gbnf sequence": ("root ::= r0\n", " ::= ", lambda names: " ".join(names) or '"x"'),
    "gbnf choice": ("root ::= r0\n", " ::= ", lambda names: " | ".join([*names, '"x"'])),
}
DIALECTS = (*_IN_SCHEMA, *_IN_RULES, "regex", "nested schema", "choice")


def shaped(dialect: str, shape: str, size: int, seed: int = 0) -> StructuredOutputs:
    """Return a grammar of so many definitions. Dialects without definitions are nested or listed instead."""
    if dialect == "regex":
        return StructuredOutputs(regex="".join("(a|b" for _ in range(size)) + ")" * size + f"{{0,{size}}}")
    if dialect == "choice":
        return StructuredOutputs(choice=[f"{index}" * (index % 9 + 1) for index in range(size)])
    if dialect == "nested schema":
        return StructuredOutputs(json='{"type":"array","items":' * size + "true" + "}" * size)
    graph = SHAPES[shape](size, Random(seed))
    if dialect in _IN_SCHEMA:
        return StructuredOutputs(json=json.dumps(_schema(_IN_SCHEMA[dialect], graph)))
    first, arrow, body = _IN_RULES[dialect]
    letter = "R" if "terminals" in dialect else "r"
    rules = (f"{letter}{index}{arrow}{body([f'{letter}{to}' for to in tos])}\n" for index, tos in enumerate(graph))
    return StructuredOutputs(grammar=first + "".join(rules))


def _schema(of: Callable[[list[Schema]], Schema], graph: Graph) -> Schema:
    definitions = {f"d{index}": of([{"$ref": f"#/$defs/d{to}"} for to in tos]) for index, tos in enumerate(graph)}
    return {"$ref": "#/$defs/d0", "$defs": definitions}
