"""Tool parsers: the formats in which models write tool calls, JSON objects told from text by the marks around them."""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Callable, Collection

from quire.frontend.text.chat.call_reader import CallReader
from quire.frontend.text.chat.events import ContentDelta, Event
from quire.frontend.text.chat.scanning import gap_before, match_mark, partial_mark


def new_call_id() -> str:
    """Return a random id in the form of OpenAI's tool calls."""
    return "call_" + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(24))


class _State(enum.Enum):
    START = enum.auto()  # of the answer
    TEXT = enum.auto()
    CALL = enum.auto()
    AFTER_CALL = enum.auto()


class ToolParser:
    """Parser that splits an answer that arrives in pieces, cut anywhere, into content and tool calls.

    Text that turns out not to be a call is content, to the last character. A call that breaks off after it was emitted
    ends there, and the text that follows is content. White space and marks around a call belong to the call.

    `names` are the functions that exist; None for any. A bare format, which only its shape distinguishes from an answer
    in JSON, accepts only these names; a marked format accepts any name, so that the client can report the mistake.
    """

    tag: str | None = None  # begins a call anywhere in the text
    opening: str | None = None  # begins the first call at the start of the text; "" for the call itself
    separator: str | None = None  # between a call and the next
    closing: str | None = None  # ends the calls
    bare = False

    def __init__(self, names: Collection[str] | None = None, new_id: Callable[[], str] = new_call_id) -> None:
        self._names = names if self.bare else None
        self._new_id = new_id
        self._state = _State.START
        self._buffer = ""  # arrived, not parsed yet
        self._mark = ""  # the mark before the call that is being read
        self._num_calls = 0
        self._after_call = False  # only white space since the last call
        self._events: list[Event] = []
        self._reader: CallReader
        if self.opening is None:
            self._enter(_State.TEXT)
        elif not self.opening:
            self._enter(_State.CALL)

    def feed(self, delta: str) -> list[Event]:
        """Parse the next piece of the text; return the events that are certain now."""
        self._buffer += delta
        while self._buffer and self._step():
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        if self._state is _State.CALL and not self._reader.started:
            self._add_content(self._mark + self._reader.raw)
        elif self._state is not _State.AFTER_CALL and not (self._after_call and not self._buffer.strip()):
            self._add_content(self._buffer)
        self._buffer = ""
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _accepts(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _add_content(self, text: str) -> None:
        if text:
            self._after_call = False
            self._events.append(ContentDelta(text))

    def _step(self) -> bool:
        """Parse more of the buffer; return False if that needs more text."""
        if self._state is _State.START:
            return self._step_marks((self.opening, _State.CALL))
        if self._state is _State.AFTER_CALL:
            return self._step_marks((self.separator, _State.CALL), (self.closing, _State.TEXT))
        return self._read_call() if self._state is _State.CALL else self._read_text()

    def _step_marks(self, *ways: tuple[str | None, _State]) -> bool:
        """Enter the state whose mark comes next; if none can come, the rest is text."""
        matches = [(match_mark(self._buffer, mark), state) for mark, state in ways if mark is not None]
        end, state = next(((end, state) for end, state in matches if end), (0, _State.TEXT))
        if not end and any(match is not None for match, _ in matches):
            return False
        self._mark, self._buffer = self._buffer[:end], self._buffer[end:]
        self._enter(state)
        return True

    def _enter(self, state: _State) -> None:
        self._state = state
        if state is _State.CALL:
            self._reader = CallReader(self._num_calls, self._new_id, self._accepts, self.bare)

    def _read_text(self) -> bool:
        at = self._buffer.find(self.tag) if self.tag else -1
        kept = at if at >= 0 else len(self._buffer) - partial_mark(self._buffer, self.tag or "")
        gap = gap_before(self._buffer, kept) if self.tag or self._after_call else 0
        self._add_content(self._buffer[: kept - gap])
        if at < 0:
            self._buffer = self._buffer[kept - gap :]
            return False
        end = at + len(self.tag or "")
        self._mark, self._buffer = self._buffer[kept - gap : end], self._buffer[end:]
        self._enter(_State.CALL)
        return True

    def _read_call(self) -> bool:
        events, self._buffer = self._reader.feed(self._buffer)
        self._events += events
        if self._reader.started and (self._reader.ended or self._reader.broken):
            self._num_calls += 1
            self._after_call = True
            self._state = _State.AFTER_CALL
        elif self._reader.broken:
            # The text that looked like a call may hold a mark. The mark before it becomes content, so this terminates.
            self._add_content(self._mark)
            self._buffer = self._reader.raw + self._buffer
            self._state = _State.TEXT
        return bool(self._buffer)


class HermesParser(ToolParser):
    """Hermes 2 and 3, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` between text."""

    tag = "<tool_call>"
    closing = "</tool_call>"


class JsonCallParser(ToolParser):
    """Any model: a grammar forces the whole answer to be `[{"name": ..., "arguments": {...}}, ...]`."""

    opening = "["
    separator = ","
    closing = "]"
    bare = True


class Llama3JsonParser(ToolParser):
    """Llama 3.1 and 3.2: `{"name": ..., "parameters": {...}}` separated by `;`, at the start or after a python tag.

    The tag is a special token: it is visible only if the text is decoded with special tokens, but nothing needs it.
    """

    tag = "<|python_tag|>"
    opening = ""
    separator = ";"
    bare = True


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "json_call": JsonCallParser,
    "llama3_json": Llama3JsonParser,
}


def detect_parser(template_source: str) -> str | None:
    """Return the name of the format that a chat template shows; None if it has no tools, or an unknown format.

    `json_call` is never detected: no model is trained on it.
    """
    if "tools" not in template_source:
        return None
    if "<tool_call>" in template_source and '"arguments"' in template_source.replace("\\", ""):
        return "hermes"
    if "<|start_header_id|>" in template_source and '"parameters"' in template_source.replace("\\", ""):
        return "llama3_json"
    return None
