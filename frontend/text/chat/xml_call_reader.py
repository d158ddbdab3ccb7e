"""The reader of one tool call that a model writes in tags, a tag for each argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.frontend.text.chat.buffered_call_reader import BufferedCallReader
from quire.frontend.text.chat.scanning import JsonScanner, match_mark, partial_mark
from quire.frontend.text.chat.schema_types import ALL_TYPES, STRING, as_json, value_types
from quire.frontend.text.chat.tag_styles import QWEN3_CODER, TagStyle


class XmlCallReader(BufferedCallReader):
    """Reader of a call in the tags of `style`, from the function's name on.

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
        style: TagStyle = QWEN3_CODER,
    ) -> None:
        super().__init__(index, new_id, accepts)
        self._schemas = schemas
        self._style = style
        self._close = style.close
        self._schema: dict[str, Any] = {}
        self._types = ALL_TYPES
        self._num_values = 0
        self._searched = 0  # where the end of the value has not been found

    def _read_name(self) -> bool:
        found = self._style.name_pattern.match(self._buffer)
        if found is None or found[2] is None:
            rest = self._buffer[found.end() if found else 0 :]
            has_other = found is None and bool(rest.strip())
            self.broken = has_other or match_mark(rest, self._style.name_end or "<") is None
            return False
        if not self._start(found[1], found.end()):
            return False
        self._schema = self._schemas.get(found[1]) or {}
        self._emit("{")
        self._phase = self._read_tag
        return True

    def _read_tag(self) -> bool:
        """Read the tag of an argument or of the call's end, after a gap."""
        found = self._style.tag_pattern.match(self._buffer)
        if found is None and self._style.may_be_tag(self._buffer.lstrip()):
            return False
        self._buffer = self._buffer[found.end() if found else 0 :]
        if found is not None and found[2] is not None:
            self._begin_value(found[2].strip())
            return True
        self._emit("}")
        self.ended = True
        return False

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
        at = self._buffer.find(self._close)
        held = max(partial_mark(self._buffer, self._close), partial_mark(self._buffer, "\n" + self._close))
        text = self._buffer[: len(self._buffer) - held] if at < 0 else self._buffer[:at].removesuffix("\n")
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._emit('"')
        self._end_value(at)
        return True

    def _read_json(self) -> bool:
        at = self._buffer.find(self._close, self._searched)
        while at >= 0 and _is_within_string(self._buffer[:at]):
            at = self._buffer.find(self._close, at + 1)
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(self._close))
            return False
        self._emit(as_json(self._buffer[:at].removesuffix("\n"), self._types))
        self._end_value(at)
        return True

    def _end_value(self, at: int) -> None:
        self._buffer = self._buffer[at + len(self._close) :]
        self._phase = self._read_tag


def _is_within_string(text: str) -> bool:
    """Return True if `text` ends within a string of an array or object."""
    value = text.lstrip()
    if not value.startswith(("{", "[")):
        return False
    scanner = JsonScanner()
    scanner.scan(value, 0)
    return scanner.in_string
