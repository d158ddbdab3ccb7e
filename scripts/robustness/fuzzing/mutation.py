"""Mutation of decoded JSON and msgpack, so that most mutants get past the decoder."""

from __future__ import annotations

import copy
import math
from random import Random
from typing import Any

_NUMBERS: tuple[int | float, ...] = (
    0, 1, -1, 2, 7, 8, 31, 32, 64, 127, 128, 255, 256, 4096, 65535, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 32,
    (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 1e300,
    math.inf, -math.inf, math.nan,
)  # fmt: skip
_TEXTS = ("", " ", "a", "\0", "\n", "é", "\ufffd", "😀", "0", "-1", "1e999", "null", "..", "/", "a" * 300, "{", "%s")
_DEEPEST = 2000

_Place = tuple[Any, Any]
"""A container, and the index or key of a value in it."""


def mutated(value: Any, random: Random) -> Any:
    """Return a copy of `value` that differs in one to four places."""
    root = [copy.deepcopy(value)]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _mutate_place(_places(root), random)
    return root[0]


def _places(root: list[Any]) -> list[_Place]:
    found: list[_Place] = []
    pending: list[Any] = [root]
    while pending:
        container = pending.pop()
        keys = range(len(container)) if isinstance(container, list) else list(container)
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], list | dict):
                pending.append(container[key])
    return found


def _mutate_place(places: list[_Place], random: Random) -> None:
    container, key = random.choice(places)
    value = container[key]
    other_container, other_key = random.choice(places)
    choice = random.randrange(10)
    if choice < 4:
        container[key] = _varied(value, random)
    elif choice == 4:
        container[key] = _interesting(random)
    elif choice == 5:
        container[key] = copy.deepcopy(other_container[other_key])
    elif choice == 6 and container is not places[0][0]:  # the root stays
        del container[key]
    elif choice == 7 and isinstance(container, dict):
        container[str(other_key)] = container.pop(key)
    elif choice == 8 and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    else:
        container[key] = random.choice(([value], [value] * 40, {"a": value}, {str(other_key): value}))


def _interesting(random: Random) -> Any:
    if random.randrange(200) == 0:
        deep: Any = []
        for _ in range(random.randrange(_DEEPEST)):
            deep = [deep]
        return deep
    return copy.deepcopy(random.choice((None, True, False, [], {}, random.choice(_TEXTS), random.choice(_NUMBERS))))


def _varied(value: Any, random: Random) -> Any:
    """Return a value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            near = (value + 1, value - 1, -value, value * 2, value // 2, float(value), random.choice(_NUMBERS))
            return random.choice(near) if math.isfinite(value) else random.choice(_NUMBERS)
        case str():
            at = random.randint(0, len(value))
            text = random.choice(_TEXTS)
            return random.choice((value[:at], value[at:], value[:at] + text + value[at:], value * 2, text))
        case list():
            return random.choice((value[1:], value[:-1], value[::-1], value * 2, sorted(value, key=repr)))
        case dict():
            return dict(random.sample(sorted(value.items(), key=repr), random.randint(0, len(value))))
        case _:
            return _interesting(random)
