"""The reader of one tool call that a model writes as a call of Python, as OLMo 3 and LFM2 do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.frontend.text.chat.buffered_call_reader import BufferedCallReader
from quire.frontend.text.chat.scanning import MAX_GAP
from quire.frontend.text.chat.schema_types import parse_json, python_as_json

_NAME = re.compile(r"\s*([A-Za-z_][\w.-]{0,63})?(\s*\()?", re.ASCII)
_KEY = re.compile(r"\s*(\)|([A-Za-z_]\w*)\s*=)", re.ASCII)
_KEY_BEGINS = re.compile(r"\s*[\w\s]{0,256}", re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ESCAPE_OR_BREAK = re.compile(r"\\\r\n|\\.|[\r\n]", re.DOTALL)
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


class KeywordCallReader(BufferedCallReader):
    """Reader of `NAME(KEY=VALUE, ...)`.

    The arguments become a JSON object. Values are literals of Python or JSON, whose strings may have line breaks; each
    comes when it is complete. A value that is neither breaks the call.
    """

    def __init__(self, index: int, new_id: Callable[[], str], accepts: Callable[[str], bool]) -> None:
        super().__init__(index, new_id, accepts)
        self._key = ""
        self._num_values = 0
        self._begin_value()

    def _read_name(self) -> bool:
        found = _NAME.match(self._buffer)
        name, opening = (found[1], found[2]) if found else (None, None)
        if not name or opening is None:
            rest = self._buffer[found.end() if found else 0 :]
            self.broken = bool(rest.strip() or (opening and not name)) or len(self._buffer) > 64 + MAX_GAP
            return False
        if not self._start(name, found.end() if found else 0):
            return False
        self._emit("{")
        self._phase = self._read_key
        return True

    def _read_key(self) -> bool:
        """Read the name of an argument, or the end of the call."""
        found = _KEY.match(self._buffer)
        if found is None:
            self.broken = _KEY_BEGINS.fullmatch(self._buffer) is None
            return False
        self._buffer = self._buffer[found.end() :]
        if found[2] is None:
            self._end()
            return False
        self._key = found[2]
        self._begin_value()
        self._phase = self._read_value
        return True

    def _begin_value(self) -> None:
        self._scanned = 0
        self._brackets: list[str] = []
        self._quote = ""

    def _read_value(self) -> bool:
        """Read a value up to the comma or bracket after it."""
        while self._scanned < len(self._buffer):
            char = self._buffer[self._scanned]
            if self._quote:
                if char == "\\" and self._scanned + 1 == len(self._buffer):
                    return False
                self._scanned += char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "'\"":
                self._quote = char
            elif char in _CLOSING:
                self._brackets.append(_CLOSING[char])
            elif not self._brackets and char in ",)":
                return self._end_value(is_last=char == ")")
            elif char in ")]}" and (not self._brackets or self._brackets.pop() != char):
                self.broken = True
                return False
            self._scanned += 1
        return False

    def _end_value(self, is_last: bool) -> bool:
        text = self._buffer[: self._scanned].strip()
        value = text if parse_json(text) is not None else python_as_json(_with_escaped_breaks(text))
        if value is None:
            self.broken = True
            return False
        self._buffer = self._buffer[self._scanned + 1 :]
        comma = ", " if self._num_values else ""
        self._num_values += 1
        self._emit(f"{comma}{json.dumps(self._key)}: {value}")
        if is_last:
            self._end()
        else:
            self._phase = self._read_key
        return not is_last

    def _end(self) -> None:
        self._emit("}")
        self.ended = True


def _with_escaped_breaks(text: str) -> str:
    """Return a literal of Python with the line breaks in its strings escaped, without which it is none.

    Those after a backslash are none of the value's.
    """
    if "\n" not in text and "\r" not in text:
        return text
    return _STRING.sub(lambda found: _ESCAPE_OR_BREAK.sub(_escaped_break, found[0]), text)


def _escaped_break(found: re.Match[str]) -> str:
    return {"\n": "\\n", "\r": "\\r", "\\\n": "", "\\\r\n": ""}.get(found[0], found[0])
