"""What the tool parsers have in common: calls are JSON objects, told from words by what stands around them."""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Callable, Collection

from quire.frontend.text.chat.call_reader import CallReader
from quire.frontend.text.chat.events import ContentDelta, Event
from quire.frontend.text.chat.marks import gap_before, match_mark, partial_mark


def new_call_id() -> str:
    """An id as OpenAI gives a tool call."""
    return "call_" + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(24))


class _State(enum.Enum):
    START = enum.auto()  # of the answer
    TEXT = enum.auto()
    CALL = enum.auto()
    AFTER_CALL = enum.auto()


class ToolParser:
    """Splits the text of an answer into content and tool calls, as it arrives, cut at any place.

    What turns out to be no call is content, to the last character. A call that breaks off after it was reported ends
    there, and what follows is content. The white space and the marks around a call are part of it.

    `names` are the functions that exist; None for any. A bare format, which nothing but its shape tells from an answer
    in JSON, takes only these for calls; a marked one takes whatever the model calls, so that the client can tell it.
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
        self._buffer = ""  # arrived, and not understood yet
        self._mark = ""  # what stood before the call that is being read
        self._num_calls = 0
        self._after_call = False  # nothing but white space has come since
        self._events: list[Event] = []
        self._reader: CallReader
        if self.opening is None:
            self._enter(_State.TEXT)
        elif not self.opening:
            self._enter(_State.CALL)

    def feed(self, delta: str) -> list[Event]:
        """Read the next piece of the text; return what is certain now."""
        self._buffer += delta
        while self._buffer and self._step():
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the text: return what was held back."""
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
        """Understand more of the buffer; False if that needs more text."""
        if self._state is _State.START:
            return self._step_marks((self.opening, _State.CALL))
        if self._state is _State.AFTER_CALL:
            return self._step_marks((self.separator, _State.CALL), (self.closing, _State.TEXT))
        return self._read_call() if self._state is _State.CALL else self._read_text()

    def _step_marks(self, *ways: tuple[str | None, _State]) -> bool:
        """Go the way whose mark comes next; if none can, the rest is text."""
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
            # what looked like a call may hold the mark of one; the mark before it is words, so this comes to an end
            self._add_content(self._mark)
            self._buffer = self._reader.raw + self._buffer
            self._state = _State.TEXT
        return bool(self._buffer)
