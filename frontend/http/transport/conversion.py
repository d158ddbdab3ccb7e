"""Parts of bodies as structs, in spite of nulls where nothing is expected, and of integers that are written as 42.0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

AT = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
"""A message of `ValidationError`: what is wrong, and the path of the part that it is wrong with."""

_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of a path: into a field, or to an item of a list
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_NO_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MOST_EXACT = 1 << 53  # above it not every integer is a float


def can_convert(error: msgspec.ValidationError) -> bool:
    """Return whether `converted` might accept a value that is not of its type because of this error."""
    return unknown_field(error) is not None or _lacks_integer(error)


def converted(value: Any, kind: type[S]) -> S:
    """Return `value` as a struct, ignoring unknown fields that are null. Raises `ValidationError`.

    Integers may be written as 42.0 or 1e1, as in JSON Schema. The value is changed, in all objects of a kind at once,
    which are at the same place in the entries of the same lists, so that the cost does not grow with their number.
    """
    while True:
        try:
            return msgspec.convert(value, kind, str_keys=True)
        except msgspec.ValidationError as error:
            if not (_drops_nulls(value, error) or _makes_integers(value, error)):
                raise


def _drops_nulls(value: Any, error: msgspec.ValidationError) -> bool:
    """Remove all nulls from the object with the unknown field; return whether that field was one of them.

    An object that may hold anything, such as a JSON schema, has no unknown fields and keeps its nulls.
    """
    name, match = unknown_field(error), AT.fullmatch(str(error))
    if name is None or match is None:
        return False
    part, alike = _parts_at(value, _STEP.findall(match["path"] or ""))
    if part[name] is not None:
        return False
    for each in alike:
        if isinstance(each, dict):
            for null in [field for field, content in each.items() if content is None]:
                del each[null]
    return True


def _lacks_integer(error: msgspec.ValidationError) -> bool:
    """Return whether there is a number with a fraction or an exponent where an integer is expected."""
    return _NO_INTEGER.match(str(error)) is not None


def _makes_integers(value: Any, error: msgspec.ValidationError) -> bool:
    """Make integers of the floats beside the one at fault that are whole; return whether that one was."""
    match = AT.fullmatch(str(error))
    if match is None or not _lacks_integer(error):
        return False
    steps = _STEP.findall(match["path"] or "")
    if not steps or "".join(f".{key}" if key else f"[{index}]" for key, index in steps) != match["path"]:
        return False  # in an object with any keys
    part, alike = _parts_at(value, steps[:-1])
    key, index = steps[-1]
    if not _is_whole(part[int(index) if index else key]):
        return False
    for each in alike:
        entries = each.items() if isinstance(each, dict) else enumerate(each) if isinstance(each, list) else ()
        for place in [place for place, entry in entries if _is_whole(entry)]:
            each[place] = int(each[place])
    return True


def _is_whole(number: object) -> bool:
    return isinstance(number, float) and number.is_integer() and abs(number) <= _MOST_EXACT


def _parts_at(value: Any, steps: Iterable[tuple[str, str]]) -> tuple[Any, list[Any]]:
    """Return the part of a body at a path, and all parts at this path in any of the entries of the same lists."""
    part, alike = value, [value]
    for key, index in steps:
        part = part[int(index) if index else key]
        alike = list(_entries(alike) if index else _contents(alike, key))
    return part, alike


def _entries(parts: Iterable[Any]) -> Iterator[Any]:
    return (entry for part in parts if isinstance(part, list) for entry in part)


def _contents(parts: Iterable[Any], key: str) -> Iterator[Any]:
    return (part[key] for part in parts if isinstance(part, dict) and key in part)


def unknown_field(error: msgspec.ValidationError) -> str | None:
    """Return the name of the unknown field that caused the error, None for any other error."""
    match = AT.fullmatch(str(error))
    unknown = None if match is None else _UNKNOWN.fullmatch(match["what"])
    return None if unknown is None else unknown["name"]
