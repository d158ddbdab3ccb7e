"""Regular expressions of clients (ECMA-262, Python) in the dialect of Rust's regex-syntax, which llguidance reads."""

from __future__ import annotations

import re

_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_OPEN_QUANTIFIER = re.compile(r"\{,\d*\}")
_VERBOSE = re.compile(r"\(\?[a-wyzA-Z]*x[a-zA-Z]*(?:-[a-zA-Z]*)?[:)]")
_POSIX = re.compile(r"\[([:.=])\^?[^\]\[]*\1\]")
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^{}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_UNIT = re.compile(r"\\u([dD][89a-fA-F][0-9a-fA-F]{2})")
_SETS = "dDwWsSpP"  # escapes that stand for many characters, and so for no end of a range


def translate_regex(pattern: str) -> str:
    r"""Return the pattern with the same meaning for Rust's regex-syntax.

    That reads `&&`, `--`, `~~` and `[` in a class as operators, a `{` that begins no quantifier as an error, and a few
    escapes in another way. Raises ValueError for what ECMA-262 and Python read in different ways, or not at all.
    Other errors are left to the library.
    """
    parts, at = list[str](), 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            part, at, _ = _escape(pattern, at, in_class=False)
        elif char == "[":
            part, at = _class(pattern, at)
        elif char == "{":
            part, at = _brace(pattern, at)
        elif char == "(" and (flags := _VERBOSE.match(pattern, at)):
            raise _refused(pattern, at, f"has the flag x ({flags[0]!r}), which not all dialects have; write it without")
        else:
            part, at = char, at + 1
        parts.append(part)
    return "".join(parts)


def _brace(pattern: str, at: int) -> tuple[str, int]:
    if quantifier := _QUANTIFIER.match(pattern, at):
        return quantifier[0], quantifier.end()
    if unclear := _OPEN_QUANTIFIER.match(pattern, at):
        raise _refused(
            pattern,
            at,
            f"has {unclear[0]!r}, a quantifier in Python and text in ECMA-262; write {{0{unclear[0][1:]} or "
            rf"\{unclear[0]}",
        )
    return r"\{", at + 1


def _escape(pattern: str, at: int, *, in_class: bool) -> tuple[str, int, bool]:
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


def _class(pattern: str, begin: int) -> tuple[str, int]:
    """Return the translation of the class that begins at an index, and the index of its end.

    A `]` that comes first is text, as everywhere but in ECMA-262, where a class without members can't be of use.
    """
    at = begin + 1
    parts = ["["]
    if pattern.startswith("^", at):
        parts.append("^")
        at += 1
    first = at
    while not pattern.startswith("]", at) or at == first:
        member, at, is_set = _member(pattern, at, begin)
        parts.append(member)
        if pattern.startswith("-", at) and at + 1 < len(pattern) and pattern[at + 1] != "]":
            end, at, is_end_set = _member(pattern, at + 1, begin)
            parts.append(rf"\-{end}" if is_set or is_end_set else f"-{end}")
    return "".join([*parts, "]"]), at + 1


def _member(pattern: str, at: int, begin: int) -> tuple[str, int, bool]:
    """Return the translation of a member of a class, the index of its end, and whether it is a set."""
    if at >= len(pattern):
        raise _refused(
            pattern, begin, r"has a class '[' without its end; close it with ']', or write \[ or \] for text"
        )
    char = pattern[at]
    if char == "\\":
        return _escape(pattern, at, in_class=True)
    if char == "[" and (posix := _POSIX.match(pattern, at)):
        raise _refused(pattern, at, f"has {posix[0]!r}, which ECMA-262 and Python don't know; write its characters")
    return (f"\\{char}" if char in r"[]^-&~" else char), at + 1, False


def _refused(pattern: str, at: int, words: str) -> ValueError:
    shown = pattern if len(pattern) <= 60 else f"{pattern[max(0, at - 20) : at + 30]}..."
    return ValueError(f"the regular expression {shown!r} {words} (at character {at + 1})")
