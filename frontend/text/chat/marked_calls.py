"""The base of tool parsers: it tells calls from text by the marks around them."""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from quire.frontend.text.chat.call_reader import CallReader
from quire.frontend.text.chat.events import ContentDelta, Event
from quire.frontend.text.chat.scanning import gap_before, match_mark, partial_mark

ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return a random id in the form of OpenAI's tool calls."""
    return "call_" + "".join(secrets.choice(ALPHANUMERIC) for _ in range(24))


class Reader(Protocol):
    """A reader of one call, which `CallReader` documents."""

    started: bool
    ended: bool
    broken: bool

    @property
    def raw(self) -> str:
        """The text read so far, while the call has not started."""

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read on; return the new events, and the rest of `text` after the call's end or break."""


class State(enum.Enum):
    """The part of an answer that comes next."""

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
    `schemas` are those of the functions' arguments, by name, for formats that do not show the type of a value.
    `new_id` makes the ids of calls, in place of `make_id`.
    """

    tag: str | None = None  # mark that begins a call, or a list of calls, anywhere in the text
    other_tags: tuple[str, ...] = ()  # other marks with the meaning of `tag`
    call_tags: tuple[str, ...] = ()  # marks that begin a call anywhere in the text, although `tag` begins a list
    list_opening: str | None = None  # mark between `tag` and the first call of a list; None: a call follows `tag`
    opening: str | None = None  # mark of a first call that starts the text; "": it needs none
    separator: str | None = None  # mark between a call and the next
    closing: str | None = None  # mark that ends the calls
    end_tag: str | None = None  # mark after `closing`, if the model writes it
    lead: str | None = None  # mark before the words that start the text, which is dropped
    bare = False
    make_id: Callable[[], str] = staticmethod(new_call_id)

    def __init__(
        self,
        names: Collection[str] | None = None,
        new_id: Callable[[], str] | None = None,
        schemas: Mapping[str, dict[str, Any] | None] | None = None,
    ) -> None:
        self._names = names if self.bare else None
        self._new_id = self.make_id if new_id is None else new_id
        self._schemas = schemas or {}
        self._state = State.START
        self._buffer = ""  # arrived, not parsed yet
        self._mark = ""  # the mark before the call that is being read
        self._num_calls = 0
        self._after_call = False  # only white space since the last call
        self._events: list[Event] = []
        self._reader: Reader
        if self.opening is None and self.lead is None:
            self._enter(State.TEXT)
        elif self.opening == "":
            self._enter(State.CALL)

    @classmethod
    def marks(cls) -> set[str]:
        """Return the marks that are needed to find calls; a bare format does not need its own."""
        marks = (cls.tag, *cls.other_tags, *cls.call_tags, cls.closing, cls.end_tag)
        return set() if cls.bare else set(filter(None, marks))

    def feed(self, delta: str) -> list[Event]:
        """Parse the next piece of the text; return the events that are certain now."""
        self._buffer += delta
        while self._buffer and self._step():
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        if self._state is State.CALL and not self._reader.started:
            self._add_content(self._mark + self._reader.raw)
        elif self._state is State.LIST:
            self._add_content(self._mark + self._buffer)
        elif self._state not in (State.AFTER_CALL, State.END) and not (self._after_call and not self._buffer.strip()):
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
        if self._state is State.START:
            return self._step_marks((self.opening, State.CALL), (self.lead, State.TEXT))
        if self._state is State.AFTER_CALL:
            return self._step_after_call()
        if self._state is State.END:
            return self._step_marks((self.end_tag, State.TEXT))
        if self._state is State.LIST:
            return self._open_list()
        return self._read_call() if self._state is State.CALL else self._read_text()

    def _step_after_call(self) -> bool:
        after = State.TEXT if self.end_tag is None else State.END
        return self._step_marks((self.separator, State.CALL), (self.closing, after))

    def _step_marks(self, *ways: tuple[str | None, State]) -> bool:
        """Enter the state whose mark comes next; if none can come, the rest is text."""
        matches = [(match_mark(self._buffer, mark), state) for mark, state in ways if mark is not None]
        end, state = next(((end, state) for end, state in matches if end), (0, State.TEXT))
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
            self._enter(State.TEXT)
        else:
            self._mark, self._buffer = self._mark + self._buffer[:end], self._buffer[end:]
            self._enter(State.CALL)
        return True

    def _enter(self, state: State) -> None:
        self._state = state
        if state is State.CALL:
            self._reader = self._new_reader()

    def _new_reader(self) -> Reader:
        """Return the reader of the next call, which begins after its tag."""
        return CallReader(self._num_calls, self._new_id, self._accepts, self.bare)

    def _read_text(self) -> bool:
        tags = (self.tag, *self.other_tags, *self.call_tags) if self.tag else ()
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
        self._enter(State.CALL if self.list_opening is None or tag in self.call_tags else State.LIST)
        return True

    def _read_call(self) -> bool:
        events, self._buffer = self._reader.feed(self._buffer)
        self._events += events
        if self._reader.started and (self._reader.ended or self._reader.broken):
            self._num_calls += 1
            self._after_call = True
            self._state = State.AFTER_CALL
        elif self._reader.broken:
            # The text that looked like a call may hold a mark. The mark before it becomes content, so this terminates.
            self._add_content(self._mark)
            self._buffer = self._reader.raw + self._buffer
            self._state = State.TEXT
        return bool(self._buffer)
