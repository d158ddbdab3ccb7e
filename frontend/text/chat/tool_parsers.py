"""Tool parsers: the formats in which models write tool calls, JSON objects told from text by what is around them."""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Callable, Collection

from quire.frontend.text.chat.call_reader import CallReader
from quire.frontend.text.chat.events import ContentDelta, Event
from quire.frontend.text.chat.line_call_reader import LineCallReader
from quire.frontend.text.chat.scanning import gap_before, match_mark, partial_mark


def new_call_id() -> str:
    """Return a random id in the form of OpenAI's tool calls."""
    return "call_" + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(24))


class _State(enum.Enum):
    START = enum.auto()  # of the answer
    TEXT = enum.auto()
    LIST = enum.auto()  # after a tag that a list of calls follows
    CALL = enum.auto()
    AFTER_CALL = enum.auto()
    END = enum.auto()  # after the calls


class ToolParser:
    """Parser that splits an answer that arrives in pieces, cut anywhere, into content and tool calls.

    Text that turns out not to be a call is content, to the last character. A call that breaks off after it was emitted
    ends there, and the text that follows is content. White space and marks around a call belong to the call.

    `names` are the functions that exist; None for any. A bare format, which only its shape distinguishes from an answer
    in JSON, accepts only these names; a marked format accepts any name, so that the client can report the mistake.
    """

    tag: str | None = None  # begins a call, or a list of calls, anywhere in the text
    other_tags: tuple[str, ...] = ()  # with the same meaning
    list_opening: str | None = None  # between the tag and the first call of a list
    opening: str | None = None  # begins the first call at the start of the text; "" for the call itself
    separator: str | None = None  # between a call and the next
    closing: str | None = None  # ends the calls
    end_tag: str | None = None  # after it, if the model writes it
    bare = False
    reader: type[CallReader] | type[LineCallReader] = CallReader

    def __init__(self, names: Collection[str] | None = None, new_id: Callable[[], str] = new_call_id) -> None:
        self._names = names if self.bare else None
        self._new_id = new_id
        self._state = _State.START
        self._buffer = ""  # arrived, not parsed yet
        self._mark = ""  # the mark before the call that is being read
        self._num_calls = 0
        self._after_call = False  # only white space since the last call
        self._events: list[Event] = []
        self._reader: CallReader | LineCallReader
        if self.opening is None:
            self._enter(_State.TEXT)
        elif not self.opening:
            self._enter(_State.CALL)

    @classmethod
    def marks(cls) -> set[str]:
        """Return the marks that are needed to find calls; a bare format does not need its own."""
        return set() if cls.bare else set(filter(None, (cls.tag, *cls.other_tags, cls.closing, cls.end_tag)))

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
        elif self._state is _State.LIST:
            self._add_content(self._mark + self._buffer)
        elif self._state not in (_State.AFTER_CALL, _State.END) and not (self._after_call and not self._buffer.strip()):
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
            after = _State.TEXT if self.end_tag is None else _State.END
            return self._step_marks((self.separator, _State.CALL), (self.closing, after))
        if self._state is _State.END:
            return self._step_marks((self.end_tag, _State.TEXT))
        if self._state is _State.LIST:
            return self._open_list()
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

    def _open_list(self) -> bool:
        """Enter the first call of a list; a tag without a list is text."""
        end = match_mark(self._buffer, self.list_opening or "")
        if end == 0:
            return False
        if end is None:
            self._add_content(self._mark)
            self._enter(_State.TEXT)
        else:
            self._mark, self._buffer = self._mark + self._buffer[:end], self._buffer[end:]
            self._enter(_State.CALL)
        return True

    def _enter(self, state: _State) -> None:
        self._state = state
        if state is _State.CALL:
            self._reader = self.reader(self._num_calls, self._new_id, self._accepts, self.bare)

    def _read_text(self) -> bool:
        tags = (self.tag, *self.other_tags) if self.tag else ()
        found = [(at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0]
        at, tag = min(found, default=(-1, ""))
        partial = max((partial_mark(self._buffer, tag) for tag in tags), default=0)
        kept = at if at >= 0 else len(self._buffer) - partial
        gap = gap_before(self._buffer, kept) if tags or self._after_call else 0
        self._add_content(self._buffer[: kept - gap])
        if at < 0:
            self._buffer = self._buffer[kept - gap :]
            return False
        end = at + len(tag)
        self._mark, self._buffer = self._buffer[kept - gap : end], self._buffer[end:]
        self._enter(_State.CALL if self.list_opening is None else _State.LIST)
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


class GraniteParser(ToolParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in later versions after `<tool_call>`."""

    tag = "<|tool_call|>"
    other_tags = ("<tool_call>",)
    list_opening = "["
    separator = ","
    closing = "]"


class Phi4MiniParser(ToolParser):
    """Phi-4-mini: `functools[{"name": ..., "arguments": {...}}, ...]`, or the list between tokens for it."""

    tag = "functools"
    other_tags = ("<|tool_call|>",)
    list_opening = "["
    separator = ","
    closing = "]"
    end_tag = "<|/tool_call|>"


class Cohere2Parser(ToolParser):
    """Command R7B: `[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}, ...]` between tags."""

    tag = "<|START_ACTION|>"
    list_opening = "["
    separator = ","
    closing = "]"
    end_tag = "<|END_ACTION|>"


class Glm4Parser(ToolParser):
    """GLM-4: the name of a function alone on the first line, then its arguments; one call in an answer."""

    opening = ""
    bare = True
    reader = LineCallReader


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "cohere2": Cohere2Parser,
    "glm4": Glm4Parser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "json_call": JsonCallParser,
    "llama3_json": Llama3JsonParser,
    "phi4_mini_json": Phi4MiniParser,
}


_SIGNS = (
    ("cohere2", ("<|START_ACTION|>",)),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("glm4", ("[gMASK]<sop>", "<|observation|>")),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("phi4_mini_json", ("<|tool|>",)),
    ("phi4_mini_json", ("functools[",)),
)
"""Texts that are all in the chat templates of a format; the first that fits is meant."""
_OTHERS = ("<arg_key>",)  # texts of formats that are not known, GLM-4.5's


def detect_parser(template_source: str) -> str | None:
    """Return the name of the format that a chat template shows; None if it has no tools, or an unknown format.

    `json_call` is never detected: no model is trained on it.
    """
    source = template_source.replace("\\", "")
    if "tools" not in source or any(other in source for other in _OTHERS):
        return None
    return next((name for name, signs in _SIGNS if all(sign in source for sign in signs)), None)
