"""The log of an engine process: its stderr, shown on that of its owner."""

from __future__ import annotations

import codecs
import os
import sys
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quire.protocol.log_limit import TokenBucket

_TAIL_CHARS = 4000
_CHARS_PER_SECOND = 100_000  # that are forwarded, after a burst of ten times as many; the engine bounds its own log
_ERROR = "error: "  # begins the line with the reason why an engine can't start


class EngineLog:
    """The log that forwards an engine's stderr to this process's, and keeps its tail.

    If the owner's stderr is a terminal, the engine's is one too, so that it shows progress. The error with which it
    fails to start is not shown, since it is raised.
    """

    def __init__(self) -> None:
        self._read_fd = -1
        self._tail = ""
        self._error = ""
        self._is_started = False
        self._budget = TokenBucket(_CHARS_PER_SECOND, 10 * _CHARS_PER_SECOND)
        self._num_left_out = 0

    @property
    def stderr_tail(self) -> str:
        """The end of the engine's stderr."""
        return self._tail.strip()

    @property
    def error(self) -> str:
        """The error with which the engine failed to start; empty if it did not fail."""
        return self._error.removeprefix(_ERROR).strip()

    def mark_started(self) -> None:
        """Show everything from now on."""
        self._is_started, self._error = True, ""

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open the file descriptor of the engine's stderr; it is closed here at the end of the `with`."""
        if sys.stderr is not None and sys.stderr.isatty():
            self._read_fd, write_fd = os.openpty()
            tty.setraw(write_fd)  # keeps newlines unchanged
        else:
            self._read_fd, write_fd = os.pipe()
        try:
            yield write_fd
        finally:
            os.close(write_fd)

    def forward(self) -> None:
        """Forward until the engine closes its end."""
        at_line_start, decoder = True, codecs.getincrementaldecoder("utf-8")("replace")
        try:
            # A terminal whose other end is closed returns EIO, not the end of the file.
            with suppress(OSError):
                while chunk := os.read(self._read_fd, 65536):
                    self._take(decoder.decode(chunk), at_line_start)
                    at_line_start = chunk.endswith(b"\n")
        finally:
            os.close(self._read_fd)

    def _take(self, text: str, at_line_start: bool) -> None:
        self._tail = (self._tail + text)[-_TAIL_CHARS:]
        if self._error:
            self._error = (self._error + text)[:_TAIL_CHARS]
            return
        found = -1 if self._is_started else _find_error(text, at_line_start)
        if found >= 0:
            text, self._error = text[:found], text[found:]
        self._show(text)

    def _show(self, text: str) -> None:
        if not self._budget.take(len(text)):
            self._num_left_out += len(text)
            return
        if self._num_left_out:
            show(f"\n[{self._num_left_out} characters of the engine's stderr were left out]\n")
            self._num_left_out = 0
        show(text)


def show(text: str) -> None:
    """Write to stderr, if anybody reads it."""
    if text and sys.stderr is not None:
        with suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write(text)
            sys.stderr.flush()


def _find_error(text: str, at_line_start: bool) -> int:
    """Return the start of the line that begins with `error: `, or -1."""
    if at_line_start and text.startswith(_ERROR):
        return 0
    found = text.find("\n" + _ERROR)
    return found + 1 if found >= 0 else -1
