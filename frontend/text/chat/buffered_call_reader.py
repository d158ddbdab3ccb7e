"""Base of the readers of tool calls that keep the text which they cannot parse yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from quire.frontend.text.chat.events import Event, ToolCallArguments, ToolCallStart


class BufferedCallReader(ABC):
    """Reader of a call in phases, with the interface of CallReader.

    A phase parses more of the buffer, and returns False if that needs more text.
    """

    def __init__(self, index: int, new_id: Callable[[], str], accepts: Callable[[str], bool]) -> None:
        self.index = index
        self.started = False
        self.ended = False
        self.broken = False
        self._new_id = new_id
        self._accepts = accepts
        self._phase: Callable[[], bool] = self._read_name
        self._buffer = ""  # read, but not parsed yet
        self._events: list[Event] = []

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
        if self.ended or (self.broken and self.started):
            rest, self._buffer = self._buffer, ""
        return events, rest

    @abstractmethod
    def _read_name(self) -> bool:
        """Read up to the arguments, and start the call; the first phase."""

    def _start(self, name: str, end: int) -> bool:
        """Start the call of a function, whose name and what follows it end at `end`, if `accepts` takes the name."""
        if not self._accepts(name):
            self.broken = True
            return False
        self._buffer = self._buffer[end:]
        self.started = True
        self._events.append(ToolCallStart(self.index, self._new_id(), name))
        return True

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self.index, text))
