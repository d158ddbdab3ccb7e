"""The reader of one tool call that a model writes as marks, the function's name, and a JSON object after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from quire.frontend.text.chat.events import Event, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.scanning import MAX_GAP, WHITE_SPACE, JsonScanner, match_mark

NAME = "NAME"
ID = "ID"
"""They stand for the function's name and for an id, which is dropped, among the marks of a call."""
_NAME = re.compile(rf"[{WHITE_SPACE}]{{0,{MAX_GAP}}}([\w.-]{{1,64}})", re.ASCII)


class NamedCallReader:
    """Reader of calls such as `NAME<sep>{...}<end>`, with the interface of CallReader.

    `heads` are the ways in which a call may begin, each a sequence of marks with `NAME` among them, maybe `ID`; `tail`
    are marks that end it, each of which may be missing. White space between them belongs to the call.
    The call starts with the object, if `accepts` takes the name.
    """

    def __init__(
        self,
        index: int,
        new_id: Callable[[], str],
        accepts: Callable[[str], bool],
        heads: Sequence[tuple[str, ...]],
        tail: Sequence[str] = (),
    ) -> None:
        self.index = index
        self.started = False
        self.ended = False
        self.broken = False
        self.raw = ""
        self._new_id = new_id
        self._accepts = accepts
        self._heads = heads
        self._tail = list(tail)
        self._scanner = JsonScanner()
        self._buffer = ""  # after the object

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read on; return the new events, and the rest of `text` after the call's end or break."""
        if self.started:
            return self._read_arguments(text)
        self.raw += text
        matches = [match_head(self.raw, head) for head in self._heads]
        found = next((match for match in matches if match is not None and match[0]), None)
        if found is not None and self._accepts(found[1]):
            end, name = found
            rest, self.raw, self.started = self.raw[end:], "", True
            events, rest = self._read_arguments(rest)
            return [ToolCallStart(self.index, self._new_id(), name), *events], rest
        if found is not None or all(match is None for match in matches):
            self.broken = True
        return [], ""

    def _read_arguments(self, text: str) -> tuple[list[Event], str]:
        end = 0 if self._scanner.ended else self._scanner.scan(text, 0)
        events: list[Event] = [ToolCallArguments(self.index, text[:end])] if end else []
        self.broken = self._scanner.broken
        if not self._scanner.ended:
            return events, text[end:]
        self._buffer += text[end:]
        return events, self._read_tail()

    def _read_tail(self) -> str:
        """Skip the marks after the object; return what follows them."""
        while self._tail:
            end = match_mark(self._buffer, self._tail[0])
            if end == 0:
                return ""
            self._tail.pop(0)
            self._buffer = self._buffer[end or 0 :]
        self.ended = True
        rest, self._buffer = self._buffer, ""
        return rest


def match_head(text: str, head: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the place of the object after `head` and the name; place 0 if it may still come, None if it can't."""
    at, name = 0, ""
    for mark in (*head, "{"):
        if mark not in (NAME, ID):
            end = match_mark(text[at:], mark)
        elif found := _NAME.match(text, at):
            end = found.end() - at
            name = found[1] if mark == NAME else name
            if at + end == len(text):
                return 0, ""
        else:
            end = 0 if not text[at:].strip(WHITE_SPACE) and len(text) - at <= MAX_GAP else None
        if end is None:
            return None
        if end == 0:
            return 0, ""
        at += end
    return at - 1, name
