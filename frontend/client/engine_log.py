"""What an engine process says on its stderr: shown as it comes, and remembered for error messages."""

from __future__ import annotations

import codecs
import os
import sys
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TAIL_CHARS = 4000
_ERROR = "error: "  # begins the line in which an engine says why it cannot start


class EngineLog:
    """Forwards an engine's stderr to this process's, and keeps its end.

    An engine whose owner sits at a terminal gets a terminal as well, so that it shows progress. The error with which
    it refuses to start is not shown: it is raised.
    """

    def __init__(self) -> None:
        self._read_fd = -1
        self._tail = ""
        self._error = ""
        self._is_started = False

    @property
    def tail(self) -> str:
        """The last that it said."""
        return self._tail.strip()

    @property
    def last_words(self) -> str:
        """The tail as an appendix to a message; empty if there is none."""
        return f"; its last words:\n{self.tail}" if self.tail else ""

    @property
    def error(self) -> str:
        """The error with which it refused to start, if it did."""
        return self._error.removeprefix(_ERROR).strip()

    def started(self) -> None:
        """From now on everything is shown."""
        self._is_started, self._error = True, ""

    @contextmanager
    def open(self) -> Iterator[int]:
        """The file descriptor to be the engine's stderr; closed here at the end of the `with`."""
        if sys.stderr is not None and sys.stderr.isatty():
            self._read_fd, write_fd = os.openpty()
            tty.setraw(write_fd)  # newlines stay as they are
        else:
            self._read_fd, write_fd = os.pipe()
        try:
            yield write_fd
        finally:
            os.close(write_fd)

    def forward(self) -> None:
        """Read until the engine's end of it is closed."""
        at_line_start, decoder = True, codecs.getincrementaldecoder("utf-8")("replace")
        try:
            # A terminal whose other side is closed gives EIO, not an end of file.
            with suppress(OSError):
                while chunk := os.read(self._read_fd, 65536):
                    self._take(decoder.decode(chunk), at_line_start)
                    at_line_start = chunk.endswith(b"\n")
        finally:
            os.close(self._read_fd)

    def _take(self, text: str, at_line_start: bool) -> None:
        self._tail = (self._tail + text)[-_TAIL_CHARS:]
        if self._error:
            self._error += text
            return
        found = -1 if self._is_started else _find_error(text, at_line_start)
        if found >= 0:
            text, self._error = text[:found], text[found:]
        _show(text)


def _show(text: str) -> None:
    if text and sys.stderr is not None:
        with suppress(OSError, ValueError):  # nobody there to read it
            sys.stderr.write(text)
            sys.stderr.flush()


def _find_error(text: str, at_line_start: bool) -> int:
    """Where the line that begins with `error: ` begins, or -1."""
    if at_line_start and text.startswith(_ERROR):
        return 0
    found = text.find("\n" + _ERROR)
    return found + 1 if found >= 0 else -1
