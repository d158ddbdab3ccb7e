"""Regular expressions of clients (ECMA-262, Python) in the dialect of Rust's regex-syntax, which llguidance reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_OPEN_QUANTIFIER = re.compile(r"\{,(\d*)\}")
_DOT_IS_ALL = re.compile(r"\(\?[a-zA-Z]*s")
_VERBOSE = re.compile(r"\(\?[a-wyzA-Z]*x[a-zA-Z]*(?:-[a-zA-Z]*)?[:)]")
_POSIX = re.compile(r"\[([:.=])\^?[^\]\[]*\1\]")
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^{}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_UNIT = re.compile(r"\\u([dD][89a-fA-F][0-9a-fA-F]{2})")
_SETS = "dDwWsSpP"  # escapes that stand for many characters, and so for no end of a range


@dataclass(frozen=True)
class Dialect:
    """A dialect: the members of sets that Rust has with others, by the letter of their escape; what `.` is not."""

    sets: Mapping[str, str]
    not_dot: str
    is_python: bool = False


PYTHON = Dialect({"s": r"\s\x1c-\x1f", "w": r"\p{L}\p{N}_"}, r"\n", is_python=True)
ECMA = Dialect(
    {"d": "0-9", "s": r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff", "w": "0-9A-Za-z_"},
    r"\n\r\u2028\u2029",
)
"""The dialect of JSON schemas. Many are written in Python, so what Python reads in another way is refused, except sets,
which have more members there.
"""


def translate_regex(pattern: str, dialect: Dialect) -> str:
    r"""Return the pattern of a dialect with the same meaning for Rust's regex-syntax.

    That reads `&&`, `--`, `~~` and `[` in a class as operators, a `{` that begins no quantifier as an error, a
    quantifier of a quantifier as one of a group, and a few escapes in another way. Raises ValueError for what can't be
    read. Other errors are left to the library.
    """
    parts, at = list[str](), 0
    dot = "." if _DOT_IS_ALL.search(pattern) else f"[^{dialect.not_dot}]"
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            part, at, _ = _escape(pattern, at, dialect, in_class=False)
        elif char == "[":
            part, at = _class(pattern, at, dialect)
        elif char in "{*+?":
            part, at = _quantifier(pattern, at, dialect)
        elif char == "(" and (flags := _VERBOSE.match(pattern, at)):
            raise _refused(pattern, at, f"has the flag x ({flags[0]!r}), which not all dialects have; write it without")
        elif pattern.startswith("(?", at):
            part, at = "(?", at + 2
        else:
            part, at = dot if char == "." else char, at + 1
        parts.append(part)
    return "".join(parts)


def _quantifier(pattern: str, at: int, dialect: Dialect) -> tuple[str, int]:
    """Return the quantifier at an index, or a brace that begins none, and the index of its end."""
    if least := _OPEN_QUANTIFIER.match(pattern, at):
        if not dialect.is_python:
            raise _refused(
                pattern,
                at,
                f"has {least[0]!r}, a quantifier in Python and text in ECMA-262; write {{0{least[0][1:]} or "
                rf"\{least[0]}",
            )
        text, end = f"{{0,{least[1]}}}", least.end()
        if pattern.startswith("?", end):
            text, end = f"{text}?", end + 1
    elif found := _QUANTIFIER.match(pattern, at):
        text, end = found[0], found.end()
    else:
        return r"\{", at + 1
    if pattern.startswith(("*", "+", "?"), end) or _QUANTIFIER.match(pattern, end):
        raise _refused(
            pattern,
            at,
            f"has {pattern[at : end + 1]!r}, one quantifier after another, which is possessive or an error; leave one "
            "out, or put what the first one repeats into a group",
        )
    return text, end


def _escape(pattern: str, at: int, dialect: Dialect, *, in_class: bool) -> tuple[str, int, bool]:
    """Return the translation of the escape at an index, the index of its end, and whether it is a set."""
    found = _ESCAPE.match(pattern, at)
    if found is None:  # a backslash at the end
        return "\\", at + 1, False
    text, end = found[0], found.end()
    if unit := _UNIT.fullmatch(text):
        return _surrogates(pattern, at, int(unit[1], 16))
    kind, after = text[1], pattern[end : end + 1]
    if kind == "c" and after.isascii() and after.isalpha():
        return f"\\x{ord(after) % 32:02x}", end + 1, False
    if kind == "0" and not after.isdigit():
        text = r"\x00"
    elif kind == "b" and in_class:
        text = r"\x08"
    elif kind in "<>" or not kind.isascii():
        text = kind  # Rust has word boundaries of these names, and escapes ASCII only
    elif members := dialect.sets.get(kind.lower()):
        text = f"[{'^' * kind.isupper()}{members}]"
    return text, end, kind in _SETS


def _surrogates(pattern: str, at: int, high: int) -> tuple[str, int, bool]:
    """Return the character that two escapes of UTF-16 stand for."""
    second = _UNIT.match(pattern, at + 6)
    low = int(second[1], 16) if second else 0
    if second is None or high >= 0xDC00 or low < 0xDC00:
        raise _refused(
            pattern, at, f"has {pattern[at : at + 6]!r}, half of a character; write both halves, or \\u{{...}}"
        )
    return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), second.end(), False


def _class(pattern: str, begin: int, dialect: Dialect) -> tuple[str, int]:
    """Return the translation of the class that begins at an index, and the index of its end."""
    at = begin + 1
    parts = ["["]
    if pattern.startswith("^", at):
        parts.append("^")
        at += 1
    first = at
    if pattern.startswith("]", at) and not dialect.is_python:
        raise _refused(
            pattern,
            begin,
            f"has a class that begins with {pattern[begin : at + 1]!r}, where ']' is its end in ECMA-262 and one of "
            r"its characters in Python; write \] for the character, or [\s\S] for any character",
        )
    while not pattern.startswith("]", at) or at == first:
        member, at, is_set = _member(pattern, at, begin, dialect)
        parts.append(member)
        if pattern.startswith("-", at) and at + 1 < len(pattern) and pattern[at + 1] != "]":
            end, at, is_end_set = _member(pattern, at + 1, begin, dialect)
            parts.append(rf"\-{end}" if is_set or is_end_set else f"-{end}")
    return "".join([*parts, "]"]), at + 1


def _member(pattern: str, at: int, begin: int, dialect: Dialect) -> tuple[str, int, bool]:
    """Return the translation of a member of a class, the index of its end, and whether it is a set."""
    if at >= len(pattern):
        raise _refused(
            pattern, begin, r"has a class '[' without its end; close it with ']', or write \[ or \] for text"
        )
    char = pattern[at]
    if char == "\\":
        return _escape(pattern, at, dialect, in_class=True)
    if char == "[" and (posix := _POSIX.match(pattern, at)):
        raise _refused(pattern, at, f"has {posix[0]!r}, which ECMA-262 and Python don't know; write its characters")
    return (f"\\{char}" if char in r"[]^-&~" else char), at + 1, False


def _refused(pattern: str, at: int, words: str) -> ValueError:
    shown = pattern if len(pattern) <= 60 else f"{pattern[max(0, at - 20) : at + 30]}..."
    return ValueError(f"the regular expression {shown!r} {words} (at character {at + 1})")
