"""Writer of lines to a file that never makes its caller wait for the disk."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_MOST_WAITING = 1 << 26  # bytes that wait for the disk
_CLOSE_SECONDS = 10.0  # for which `close` waits for the disk

_LOGGER = logging.getLogger(__name__)


class LineWriter:
    """A new file and a thread that writes to it. A failure is logged once, and later lines are lost.

    `num_written` and `num_lost` count lines. Raises OSError if the file cannot be created, or exists already.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise FileExistsError(
                f"{path} exists already, and would be overwritten; name another, or remove it"
            ) from error
        except OSError as error:
            raise OSError(f"{path}: the file cannot be written ({error.strerror}); name another") from error
        self.num_written = 0
        self.num_lost = 0
        self._waiting = bytearray()
        self._num_waiting = 0
        self._is_closed = False
        self._has_failed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="quire-line-writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, its end included; return at once."""
        with self._changed:
            if self._has_failed or self._is_closed:
                self.num_lost += 1
            elif len(self._waiting) + len(line) > _MOST_WAITING:
                self.num_lost += 1
                self._fail("the disk is too slow")
            else:
                self._waiting += line
                self._num_waiting += 1
                self._changed.notify()

    def close(self) -> None:
        """Write the queued lines, within some seconds if the disk does not answer. A file without lines is removed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail("the disk does not answer")
        elif self.num_lost:
            _LOGGER.warning("%s lacks %d lines, for the reason logged before", self._path, self.num_lost)
        if not self.num_written:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        is_last = False
        with self._file:
            while not is_last:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_closed)
                    lines, self._waiting = self._waiting, bytearray()
                    num_lines, self._num_waiting = self._num_waiting, 0
                    is_last = self._is_closed
                self._write(lines, num_lines)

    def _write(self, lines: bytearray, num_lines: int) -> None:
        begin = self._file.tell()
        try:
            if not self._has_failed:
                self._write_all(lines)
                self.num_written += num_lines
                return
        except OSError as error:
            self._fail(error.strerror or str(error))
            with suppress(OSError):
                self._file.truncate(begin)  # never leave half a line
        with self._changed:
            self.num_lost += num_lines

    def _write_all(self, lines: bytearray) -> None:
        rest = memoryview(lines)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            _LOGGER.warning("%s: %s; no more is written to it, and requests go on", self._path, reason)
