"""The harmony format of gpt-oss: an answer is a sequence of messages in channels, with thoughts, calls and content."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.marked_calls import new_call_id
from quire.frontend.text.chat.scanning import partial_mark

TOOL_PARSER, REASONING_PARSER = "openai", "openai_gptoss"
"""The names of the format, vLLM's."""

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN})
STOPS = (RETURN, CALL)
"""Marks that end an answer."""
FUNCTIONS = "functions."
_TO = "to="

_HEADER_BEGINS = (START, CHANNEL, CONSTRAIN, MESSAGE, _TO)
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_MAX_HEADER = 256  # characters
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)", re.ASCII)
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([\w.:-]+)", re.ASCII)
_SHOWN_RECIPIENTS = ("user", "assistant", "all")


def is_harmony(template_source: str) -> bool:
    """Return True if a chat template writes the format."""
    return CHANNEL in template_source and MESSAGE in template_source


class HarmonyParser:
    """Parser of an answer that arrives in pieces, cut anywhere, to a prompt in the format.

    A message is `<|start|>ROLE to=RECIPIENT<|channel|>CHANNEL<|constrain|>TYPE<|message|>TEXT<|end|>`, where the
    recipient may also follow the channel, and most parts may be missing. Messages to `functions.NAME` are calls, others
    in the channel `analysis` or to other recipients, such as a tool that the model imagines, are thoughts, and the rest
    is content. Line breaks join messages of one kind. Text that no header can begin with is content too, and a header
    that is cut off is dropped.

    `names` are the functions that may be called, also without `functions.`; None if there are no calls, so that they
    are thoughts. Without `thoughts` they are content.
    """

    def __init__(
        self,
        prompt: str,
        names: Collection[str] | None,
        thoughts: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._names = names
        self._thought = ReasoningDelta if thoughts else ContentDelta
        self._new_id = new_id or new_call_id
        self._events: list[Event] = []
        self._buffer = ""
        self._kind: type[ContentDelta] | type[ReasoningDelta] | None = None  # of the message's text; None for a call
        self._num_calls = 0
        self._is_empty = True  # the message has no text yet
        self._written: set[object] = set()  # kinds of text so far
        self._has_begun = False  # a message has
        self._head = ""  # the part of the first header that is in the prompt
        self._in_header = True
        head, is_message, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        if is_message:
            self._begin(head)
            self._events.clear()
        else:
            self._head = head

    def feed(self, delta: str) -> list[Event]:
        """Parse the next piece of the text; return the events that are certain now."""
        self._buffer += delta
        while self._buffer and (self._read_header() if self._in_header else self._read_body()):
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        text, self._buffer = self._buffer, ""
        if not self._in_header:
            self._emit(text)
        elif not text.lstrip().startswith(_HEADER_BEGINS) and (text.strip() or not self._has_begun):
            self._begin_text()
            self._emit(text)
        events, self._events = self._events, []
        return events

    def _read_header(self) -> bool:
        header, is_complete, rest = self._buffer.partition(MESSAGE)
        if not _may_be_header(header + is_complete):
            self._begin_text()
            gap = len(self._buffer) - len(self._buffer.lstrip())
            mark = next((mark for mark in _HEADER_BEGINS if self._buffer.startswith(mark, gap)), "")
            self._emit(self._buffer[: gap + len(mark)])
            self._buffer = self._buffer[gap + len(mark) :]
            return True
        if is_complete:
            self._begin(self._head + header)
            self._buffer = rest
        return bool(is_complete)

    def _begin(self, header: str) -> None:
        """Begin the message of a header."""
        recipient = found[1] if (found := _RECIPIENT.search(header)) else None
        name = None if recipient is None or self._names is None else self._function(recipient, self._names)
        if name is not None:
            self._begin_text(None)
            self._events.append(ToolCallStart(self._num_calls, self._new_id(), name))
            self._num_calls += 1
            return
        channel = found[1] if (found := _CHANNEL.search(header)) else "final"
        hides = channel == "analysis" or (recipient is not None and recipient not in _SHOWN_RECIPIENTS)
        self._begin_text(self._thought if hides else ContentDelta)

    def _begin_text(self, kind: type[ContentDelta] | type[ReasoningDelta] | None = ContentDelta) -> None:
        self._in_header, self._kind, self._is_empty, self._has_begun = False, kind, True, True

    @staticmethod
    def _function(recipient: str, names: Collection[str]) -> str | None:
        name = recipient.removeprefix(FUNCTIONS)
        return name if name and (name != recipient or name in names) else None

    def _read_body(self) -> bool:
        found = [(at, mark) for mark in _BODY_ENDS if (at := self._buffer.find(mark)) >= 0]
        if not found:
            held = max(partial_mark(self._buffer, mark) for mark in _BODY_ENDS)
            kept = len(self._buffer) - held
            self._emit(self._buffer[:kept])
            self._buffer = self._buffer[kept:]
            return False
        at, mark = min(found)
        self._emit(self._buffer[:at])
        self._end_message()
        self._buffer = self._buffer[at:] if mark in (START, CHANNEL) else self._buffer[at + len(mark) :]
        return True

    def _end_message(self) -> None:
        if self._kind is None and self._is_empty:
            self._emit("{}")
        self._head, self._in_header = "", True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._kind is None:
            self._events.append(ToolCallArguments(self._num_calls - 1, text))
        else:
            joint = "\n" if self._is_empty and self._kind in self._written else ""
            self._written.add(self._kind)
            self._events.append(self._kind(joint + text))
        self._is_empty = False


def _may_be_header(text: str) -> bool:
    """Return True if `text` is a header or may begin one."""
    header = text.lstrip()
    begins = any(header.startswith(begin) or begin.startswith(header) for begin in _HEADER_BEGINS)
    return begins and len(text) <= _MAX_HEADER and "\n" not in header
