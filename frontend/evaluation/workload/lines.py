"""Lines of a trace, which may be larger than memory."""

from __future__ import annotations

from pathlib import Path
from typing import Self

MOST_LINE_BYTES = 1 << 26
"""Length limit of a line: twice what a recorded request of the server may have by default."""

_BUFFER_BYTES = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TraceError(ValueError):
    """A trace that is not readable; the text names the file and, where there is one, the line."""


class Lines:
    """Iterator over (number from 1, line without its end); the line is None if it is longer than allowed.

    Holds no more than one line. Empty lines are skipped. Raises TraceError if the file is not readable.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._is_cut = False  # the rest of the last line is still to be skipped
        try:
            self._file = path.open("rb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise self._unreadable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, bytes | None]:
        try:
            if self._is_cut:
                self._skip_rest()
            while line := self._file.readline(MOST_LINE_BYTES + 1):
                self._number += 1
                if len(line) > MOST_LINE_BYTES:
                    self._is_cut = not line.endswith(b"\n")
                    return self._number, None
                line = line.rstrip(b"\r\n")
                if self._number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line:
                    return self._number, line
        except OSError as error:
            raise self._unreadable(error) from error
        raise StopIteration

    def _skip_rest(self) -> None:
        """Skip the rest of a line, piece by piece."""
        self._is_cut = False
        while (piece := self._file.readline(_BUFFER_BYTES)) and not piece.endswith(b"\n"):
            pass

    def _unreadable(self, error: OSError) -> TraceError:
        return TraceError(f"{self._path}: {error.strerror or error}; give a trace as a readable file")
