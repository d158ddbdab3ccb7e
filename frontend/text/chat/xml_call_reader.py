"""The reader of one tool call that a model writes in tags, a tag for each argument, as Qwen3-Coder does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.frontend.text.chat.events import Event, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.scanning import MAX_GAP, JsonScanner, partial_mark
from quire.frontend.text.chat.schema_types import ALL_TYPES, STRING, as_json, value_types

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
MAX_KEY = 256
_NAME = re.compile(r"\s*([^\s<>]{1,256})(\s*>)?")
_TAG = re.compile(rf"\s*({END_FUNCTION}|{PARAMETER}([^<>\n]{{1,{MAX_KEY}}})>)")


class XmlCallReader:
    r"""Reader of `NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>`, with the interface of CallReader.

    The arguments become a JSON object. A value is a text without quotes if the schema of its function, among `schemas`,
    says that it is a string, and JSON otherwise; line breaks next to its tags are no part of it. Strings stream, other
    values come when they are complete. A call also ends where anything but an argument follows.
    """

    def __init__(
        self,
        index: int,
        new_id: Callable[[], str],
        accepts: Callable[[str], bool],
        schemas: Mapping[str, dict[str, Any] | None],
    ) -> None:
        self.index = index
        self.started = False
        self.ended = False
        self.broken = False
        self._new_id = new_id
        self._accepts = accepts
        self._schemas = schemas
        self._phase: Callable[[], bool] = self._read_name
        self._buffer = ""  # read, but not parsed yet
        self._events: list[Event] = []
        self._schema: dict[str, Any] = {}
        self._types = ALL_TYPES
        self._num_values = 0
        self._searched = 0  # where the end of the value has not been found

    @property
    def raw(self) -> str:
        """The text read so far, while the call has not started."""
        return self._buffer

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read on; return the new events, and the rest of `text` after the call's end or break."""
        self._buffer += text
        while not (self.ended or self.broken) and self._phase():
            pass
        events, self._events = self._events, []
        rest = ""
        if self.ended:
            rest, self._buffer = self._buffer, ""
        return events, rest

    def _read_name(self) -> bool:
        found = _NAME.match(self._buffer)
        if found is None or found[2] is None:
            rest = self._buffer[found.end() if found else 0 :]
            self.broken = bool(rest.strip()) or len(rest) > MAX_GAP
            return False
        name = found[1]
        if not self._accepts(name):
            self.broken = True
            return False
        self._buffer = self._buffer[found.end() :]
        self._schema = self._schemas.get(name) or {}
        self.started = True
        self._events += [ToolCallStart(self.index, self._new_id(), name), ToolCallArguments(self.index, "{")]
        self._phase = self._read_tag
        return True

    def _read_tag(self) -> bool:
        """Read the tag of an argument or of the call's end, after a gap."""
        found = _TAG.match(self._buffer)
        if found is None and self._may_be_tag(self._buffer.lstrip()):
            return False
        self._buffer = self._buffer[found.end() if found else 0 :]
        if found is not None and found[2] is not None:
            self._begin_value(found[2].strip())
            return True
        self._emit("}")
        self.ended = True
        return False

    def _may_be_tag(self, text: str) -> bool:
        """Return True if `text` may begin a tag."""
        key = text.removeprefix(PARAMETER)
        if key != text:
            return len(key) <= MAX_KEY and not any(char in key for char in "<>\n")
        return PARAMETER.startswith(text) or END_FUNCTION.startswith(text)

    def _begin_value(self, key: str) -> None:
        properties = self._schema.get("properties")
        part = properties.get(key) if isinstance(properties, Mapping) else None
        self._types = value_types(part, self._schema)
        self._emit((", " if self._num_values else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_values += 1
        self._phase = self._begin_text

    def _begin_text(self) -> bool:
        """Skip the line break that may follow the tag of a value."""
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        if self._types == STRING:
            self._emit('"')
        self._searched = 0
        self._phase = self._read_text if self._types == STRING else self._read_json
        return True

    def _read_text(self) -> bool:
        """Stream a string."""
        at = self._buffer.find(END_PARAMETER)
        held = max(partial_mark(self._buffer, END_PARAMETER), partial_mark(self._buffer, "\n" + END_PARAMETER))
        text = self._buffer[: len(self._buffer) - held] if at < 0 else self._buffer[:at].removesuffix("\n")
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._emit('"')
        self._end_value(at)
        return True

    def _read_json(self) -> bool:
        at = self._buffer.find(END_PARAMETER, self._searched)
        while at >= 0 and _is_within_string(self._buffer[:at]):
            at = self._buffer.find(END_PARAMETER, at + 1)
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(END_PARAMETER))
            return False
        self._emit(as_json(self._buffer[:at].removesuffix("\n"), self._types))
        self._end_value(at)
        return True

    def _end_value(self, at: int) -> None:
        self._buffer = self._buffer[at + len(END_PARAMETER) :]
        self._phase = self._read_tag

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self.index, text))


def _is_within_string(text: str) -> bool:
    """Return True if `text` ends within a string of an array or object."""
    value = text.lstrip()
    if not value.startswith(("{", "[")):
        return False
    scanner = JsonScanner()
    scanner.scan(value, 0)
    return scanner.in_string
