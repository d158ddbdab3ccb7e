"""The reader of one tool call that a model writes as a JSON object; it streams the arguments."""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.frontend.text.chat.events import Event, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.scanning import WHITE_SPACE, JsonScanner

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")
BARE_KEYS = (*ARGUMENT_KEYS, "name", "type", "id")


class CallReader:
    """Reader of `{"name": ..., "arguments": {...}}`, where the keys may also be "tool_name" and "parameters".

    Other keys are skipped.

    The call starts when its name is known and its arguments have begun, in either order; until then `raw` holds the
    text, which becomes content again if it turns out not to be a call. The call ends with the object (`ended`), or
    where the text stops being one (`broken`). Arguments may also be a string that holds an object, null, or missing.
    An object whose name `accepts` rejects is not a call. A `bare` call, without a mark before it, must have arguments,
    and is given up at the first key that calls do not have: it is likely a JSON answer, which must not be held back.
    """

    def __init__(
        self, index: int, new_id: Callable[[], str], accepts: Callable[[str], bool], bare: bool = False
    ) -> None:
        self.index = index
        self.started = False
        self.ended = False
        self.broken = False
        self._new_id = new_id
        self._accepts = accepts
        self._bare = bare
        self._phase: Callable[[str, int], int] = self._open
        self._raw: list[str] = []
        self._events: list[Event] = []
        self._scanner = JsonScanner()
        self._in_key = False
        self._key: str | None = None
        self._value: list[str] = []
        self._name: str | None = None
        self._arguments: list[str] | None = None  # not emitted yet; None before they begin

    @property
    def raw(self) -> str:
        """The text read so far, while the call has not started."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read on; return the new events, and the rest of `text` after the call's end or break."""
        at = 0
        while at < len(text) and not (self.ended or self.broken):
            at = self._phase(text, at)
        if not self.started:
            self._raw.append(text[:at])
        events, self._events = self._events, []
        return events, text[at:]

    def _open(self, text: str, at: int) -> int:
        return self._expect("{", self._begin_key, text, at)

    def _begin_key(self, text: str, at: int) -> int:
        if text[at] != '"':
            return self._expect("", self._begin_key, text, at, may_end=True)
        self._in_key = True
        return self._begin_value(text, at)

    def _colon(self, text: str, at: int) -> int:
        return self._expect(":", self._begin_value, text, at)

    def _comma(self, text: str, at: int) -> int:
        return self._expect(",", self._begin_key, text, at, may_end=True)

    def _expect(self, char: str, then: Callable[[str, int], int], text: str, at: int, may_end: bool = False) -> int:
        """Skip white space up to `char`, after which the phase is `then`; break at anything else."""
        given = text[at]
        if given in WHITE_SPACE:
            return at + 1
        if given == char:
            self._phase = then
        elif given == "}" and may_end:
            self._end()
        else:
            self.broken = True
            return at
        return at + 1

    def _begin_value(self, text: str, at: int) -> int:
        if text[at] in WHITE_SPACE:
            return at + 1
        self._scanner = JsonScanner()
        self._value = []
        if self._key in ARGUMENT_KEYS and text[at] == "{" and self._arguments is None:
            self._arguments = []
            self._phase = self._read_arguments
        else:
            self._phase = self._read_value
        return at

    def _read_arguments(self, text: str, at: int) -> int:
        end = self._scan(text, at)
        assert self._arguments is not None
        self._arguments.append(text[at:end])
        self._emit()
        if self._scanner.ended:
            self._phase = self._comma
        return end

    def _read_value(self, text: str, at: int) -> int:
        end = self._scan(text, at)
        self._value.append(text[at:end])
        if self._scanner.ended:
            if self._in_key:
                self._end_key()
            else:
                self._end_value()
        return end

    def _scan(self, text: str, at: int) -> int:
        end = self._scanner.scan(text, at)
        self.broken = self._scanner.broken
        return end

    def _end_key(self) -> None:
        self._in_key = False
        self._key = _string("".join(self._value))
        self.broken = self._bare and not self.started and self._key not in BARE_KEYS
        self._phase = self._colon

    def _end_value(self) -> None:
        self._phase = self._comma
        value = "".join(self._value)
        if self._key in NAME_KEYS and self._name is None:
            self._name = _string(value)
            self.broken = not self._name or not self._accepts(self._name)
            if not self.broken:
                self._emit()
        elif self._key in ARGUMENT_KEYS and self._arguments is None:
            self._take_string(value)

    def _take_string(self, value: str) -> None:
        """Take arguments that are not an object: a string that holds one, or null."""
        held = "" if value == "null" else _string(value)
        if held is None or (held.strip() and not held.lstrip().startswith("{")):
            self.broken = True
            return
        self._arguments = [held if held.strip() else "{}"]
        self._emit()

    def _end(self) -> None:
        if not self.started and self._name is not None and self._arguments is None and not self._bare:
            self._arguments = ["{}"]
            self._emit()
        self.ended = self.started
        self.broken = not self.started

    def _emit(self) -> None:
        """Emit the arguments read so far, once the name is known."""
        if self._name is None or self._arguments is None:
            return
        if not self.started:
            self.started = True
            self._raw.clear()
            self._events.append(ToolCallStart(self.index, self._new_id(), self._name))
        delta = "".join(self._arguments)
        self._arguments = []
        if delta:
            self._events.append(ToolCallArguments(self.index, delta))


def _string(text: str) -> str | None:
    """Return the string that a JSON text encodes; None if it is not a string, or not valid UTF-8."""
    if not text.startswith('"'):
        return None
    try:
        value: str = json.loads(text, strict=False)
        value.encode()
    except ValueError:
        return None
    return value
