"""Finds where a JSON value ends in a text that arrives in pieces."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r"[\w \t\r\n,:.+-]+", re.ASCII)  # outside of strings, without brackets
_SCALAR = re.compile(r"[\w.+-]+", re.ASCII)
WHITE_SPACE = " \t\r\n"


class JsonScanner:
    """Reads one value, which begins with the first character that it is given.

    It tells strings and nesting apart and no more: `[1,,2}` is a value to it, as what a model writes is passed on as
    it is. But a character that JSON has only in strings (such as `<`) makes the value `broken` elsewhere.
    """

    def __init__(self) -> None:
        self.ended = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Read from `text[at]`; return where it stopped: the end of the text, of the value, or of what is JSON."""
        while at < len(text) and not (self.ended or self.broken):
            at = self._scan_string(text, at) if self._in_string else self._scan_outside(text, at)
        return at

    def _scan_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        plain = _IN_STRING.match(text, at)
        if plain:
            return plain.end()
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.ended = self._depth == 0
        return at + 1

    def _scan_outside(self, text: str, at: int) -> int:
        between = (_BETWEEN if self._depth else _SCALAR).match(text, at)
        if between:
            return between.end()
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif self._depth and char in "}]":
            self._depth -= 1
            self.ended = self._depth == 0
        elif not self._depth and char in ",}]" + WHITE_SPACE:
            self.ended = True  # what ends a number is not part of it
            return at
        else:
            self.broken = True
            return at
        return at + 1
