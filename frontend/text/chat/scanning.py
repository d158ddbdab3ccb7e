"""Scanners for text that arrives in pieces: marks such as `<tool_call>`, and the end of a JSON value."""

from __future__ import annotations

import re

MAX_GAP = 8  # white-space characters next to a mark that belong to it; any more belong to the text
_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r"[\w \t\r\n,:.+-]+", re.ASCII)  # outside of strings, without brackets
_SCALAR = re.compile(r"[\w.+-]+", re.ASCII)
WHITE_SPACE = " \t\r\n"


def match_mark(text: str, mark: str) -> int | None:
    """Return the end of the non-empty `mark` in `text`, after a gap; 0 if it may still come, None if it can't."""
    head = text[: MAX_GAP + 1]
    gap = len(head) - len(head.lstrip())
    if gap > MAX_GAP:
        return None
    rest = text[gap : gap + len(mark)]
    if rest == mark:
        return gap + len(mark)
    return 0 if mark.startswith(rest) else None


def partial_mark(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may begin `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def gap_before(text: str, end: int) -> int:
    """Return the number of white-space characters before `text[end]` that may belong to a mark there."""
    before = text[max(0, end - MAX_GAP) : end]
    return len(before) - len(before.rstrip())


class JsonScanner:
    """Scanner for the end of one value, which begins with the first character given.

    It tracks strings and nesting only: it takes `[1,,2}` for a value, since the model's text is passed on unchanged.
    But a character that JSON has only in strings (such as `<`) makes the value `broken` elsewhere.
    `in_string` is True while it is within a string.
    """

    def __init__(self) -> None:
        self.ended = False
        self.broken = False
        self._depth = 0
        self.in_string = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Scan from `text[at]`; return where it stopped: at the end of the text, of the value, or of valid JSON."""
        while at < len(text) and not (self.ended or self.broken):
            at = self._scan_string(text, at) if self.in_string else self._scan_outside(text, at)
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
            self.in_string = False
            self.ended = self._depth == 0
        return at + 1

    def _scan_outside(self, text: str, at: int) -> int:
        between = (_BETWEEN if self._depth else _SCALAR).match(text, at)
        if between:
            return between.end()
        char = text[at]
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif self._depth and char in "}]":
            self._depth -= 1
            self.ended = self._depth == 0
        elif not self._depth and char in ",}]" + WHITE_SPACE:
            self.ended = True  # the character that ends a number is not part of it
            return at
        else:
            self.broken = True
            return at
        return at + 1
