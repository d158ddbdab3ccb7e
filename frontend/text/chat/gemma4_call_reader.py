"""The reader of one tool call in Gemma 4's notation: `call:NAME{KEY:VALUE,...}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.frontend.text.chat.buffered_call_reader import BufferedCallReader
from quire.frontend.text.chat.named_call_reader import NAME, match_head
from quire.frontend.text.chat.scanning import JsonScanner, partial_mark
from quire.frontend.text.chat.schema_types import ALL_TYPES, as_json, parse_json

QUOTE = '<|"|>'
_HEAD = ("call:", NAME)
_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in range(32)}  # control characters, which JSON has not
_BARE = re.compile(r'[^<>,\[\]{}"]+')
_LONGEST_KEY, _LONGEST_IN_JSON = 256, 6 * 256  # characters, of which JSON may write each as six
_BARE_KEY = rf'[^\s<>,:\[\]{{}}"][^<>,:\[\]{{}}"]{{0,{_LONGEST_KEY - 1}}}'
_KEY = re.compile(
    rf'<\|"\|>(?P<quoted>(?:(?!<\|"\|>).){{0,{_LONGEST_KEY}}})<\|"\|>|(?P<json>"(?:[^"\\]|\\.){{0,{_LONGEST_IN_JSON}}}")|'
    rf"(?P<bare>{_BARE_KEY})",
    re.DOTALL,
)
_MAX_KEY = _LONGEST_IN_JSON + 2
_CLOSING = {"{": "}", "[": "]"}


class Gemma4CallReader(BufferedCallReader):
    """Reader of `call:NAME{KEY:VALUE,...}`.

    The arguments become a JSON object. Texts stand between `QUOTE` marks, keys need none; objects and arrays have the
    brackets of JSON. JSON itself is read too. Texts stream, other values come when they are complete.
    """

    def __init__(self, index: int, new_id: Callable[[], str], accepts: Callable[[str], bool]) -> None:
        super().__init__(index, new_id, accepts)
        self._closings: list[str] = []  # of the objects and arrays that are open
        self._separator = ""  # before the next key or element
        self._scanner = JsonScanner()

    def _read_name(self) -> bool:
        found = match_head(self._buffer, _HEAD)
        self.broken = found is None
        end, name = found or (0, "")
        if not end or not self._start(name, end):
            return False
        self._open()
        return True

    def _open(self) -> None:
        """Enter the object or array that the buffer begins with."""
        bracket, self._buffer = self._buffer[0], self._buffer[1:]
        self._emit(self._separator + bracket)
        self._closings.append(_CLOSING[bracket])
        self._begin_item("")

    def _begin_item(self, separator: str) -> None:
        self._separator = separator
        self._phase = self._read_key if self._closings[-1] == "}" else self._read_value

    def _close(self) -> bool:
        """Leave the innermost object or array, at its bracket."""
        self._buffer = self._buffer[1:]
        self._emit(self._closings.pop())
        self._phase = self._read_comma
        self.ended = not self._closings
        return not self.ended

    def _read_key(self) -> bool:
        text = self._skip_gap()
        if text.startswith("}"):
            return self._close()
        found = _KEY.match(text)
        rest = text[found.end() :].lstrip() if found else ""
        if found is None or not rest:
            self.broken = found is None and (len(text) > _MAX_KEY or not _may_begin_key(text))
            return False
        key = _key_of(found)
        if not rest.startswith(":") or key is None:
            self.broken = True
            return False
        self._emit(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ""
        self._buffer = rest[1:]
        self._phase = self._read_value
        return True

    def _read_value(self) -> bool:
        text = self._skip_gap()
        if not text or (text != QUOTE and QUOTE.startswith(text)):
            return False
        if text[0] in _CLOSING:
            self._open()
            return True
        if text[0] == "]" and self._closings[-1] == "]":
            return self._close()
        if text.startswith(QUOTE):
            self._buffer = text[len(QUOTE) :]
            self._begin_text('"', self._read_text)
            return True
        if text[0] == '"':
            self._scanner = JsonScanner()
            self._begin_text("", self._read_json_text)
            return True
        return self._read_bare(text)

    def _begin_text(self, opening: str, phase: Callable[[], bool]) -> None:
        self._emit(self._separator + opening)
        self._phase = phase

    def _read_bare(self, text: str) -> bool:
        """Read a number, a constant, or a word without quotes."""
        found = _BARE.match(text)
        if found is None or found.end() == len(text):
            self.broken = found is None
            return False
        self._emit(self._separator + as_json(found[0].strip(), ALL_TYPES))
        self._buffer = text[found.end() :]
        self._phase = self._read_comma
        return True

    def _read_text(self) -> bool:
        at = self._buffer.find(QUOTE)
        end = at if at >= 0 else len(self._buffer) - partial_mark(self._buffer, QUOTE)
        self._emit(json.dumps(self._buffer[:end], ensure_ascii=False)[1:-1])
        self._buffer = self._buffer[end:]
        if at < 0:
            return False
        self._buffer = self._buffer[len(QUOTE) :]
        self._emit('"')
        self._phase = self._read_comma
        return True

    def _read_json_text(self) -> bool:
        end = self._scanner.scan(self._buffer, 0)
        self._emit(self._buffer[:end].translate(_ESCAPED))
        self._buffer = self._buffer[end:]
        if self._scanner.ended:
            self._phase = self._read_comma
        return self._scanner.ended

    def _read_comma(self) -> bool:
        """Read what follows a value: a comma, or the end of its object or array."""
        text = self._skip_gap()
        if text.startswith(","):
            self._buffer = text[1:]
            self._begin_item(", ")
            return True
        if text.startswith(self._closings[-1]):
            return self._close()
        self.broken = bool(text)
        return False

    def _skip_gap(self) -> str:
        """Drop white space; return the buffer, which does not begin with any."""
        self._buffer = self._buffer.lstrip()
        return self._buffer


def _may_begin_key(text: str) -> bool:
    """Return True if `text`, which is no key yet, may begin one."""
    return not text or text.startswith((QUOTE, '"')) or QUOTE.startswith(text)


def _key_of(found: re.Match[str]) -> str | None:
    """Return the key that `_KEY` found; None if it is not valid JSON."""
    if found["json"] is None:
        return found["bare"].strip() if found["quoted"] is None else found["quoted"]
    parsed = parse_json(found["json"])
    return None if parsed is None else str(parsed[0])
