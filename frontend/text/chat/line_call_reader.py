"""The reader of one tool call that a model writes as a line with the function's name, and a JSON object after it."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.frontend.text.chat.events import Event, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.scanning import MAX_GAP, WHITE_SPACE, JsonScanner

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class LineCallReader:
    """Reader of a name, a line's end and `{...}`, with the interface of CallReader.

    The call starts with the object, if `accepts` takes the name. Text is given up as soon as it cannot be a name alone
    on its line, so that an answer in words is not held back.
    """

    def __init__(self, index: int, new_id: Callable[[], str], accepts: Callable[[str], bool]) -> None:
        self.index = index
        self.started = False
        self.ended = False
        self.broken = False
        self.raw = ""
        self._new_id = new_id
        self._accepts = accepts
        self._scanner = JsonScanner()

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read on; return the new events, and the rest of `text` after the call's end or break."""
        if self.started:
            return self._read_arguments(text)
        for at, char in enumerate(text):
            name, line_end, gap = self.raw.lstrip(WHITE_SPACE).partition("\n")
            if char == "{" and line_end and self._accepts(name):
                self.started, self.raw = True, ""
                events, rest = self._read_arguments(text[at:])
                return [ToolCallStart(self.index, self._new_id(), name), *events], rest
            if not self._may_follow(char, name, bool(line_end), gap):
                self.broken = True
                return [], text[at:]
            self.raw += char
        return [], ""

    def _may_follow(self, char: str, name: str, is_after: bool, gap: str) -> bool:
        """Return True if the character may be part of a call whose object has not begun."""
        if is_after:
            return char in WHITE_SPACE and len(gap) < MAX_GAP
        if not name:
            return (char in WHITE_SPACE and len(self.raw) < MAX_GAP) or _NAME.fullmatch(char) is not None
        return self._accepts(name) if char == "\n" else _NAME.fullmatch(name + char) is not None

    def _read_arguments(self, text: str) -> tuple[list[Event], str]:
        end = self._scanner.scan(text, 0)
        self.ended, self.broken = self._scanner.ended, self._scanner.broken
        return [ToolCallArguments(self.index, text[:end])] if end else [], text[end:]
