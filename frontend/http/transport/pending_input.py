"""The input of one connection that is not parsed yet."""

from __future__ import annotations

_SLICE_BYTES = 4 << 10  # may be some 700 chunks, or 800 headers, each of which calls the parser's user
_BODY_SLICE_BYTES = 64 << 10  # of a body of known length, which the parser passes on as it is
_END = b"\r\n\r\n"


class PendingInput:
    """Bytes in the order of their arrival, taken in slices that are cheap to parse.

    A slice goes up to an empty line at most, where a head or a body in chunks may end, or to the end of a body of known
    length. So no slice has the end of a request and the beginning of the next one.
    """

    def __init__(self) -> None:
        self._data = b""
        self._start = 0
        self._taken = b""  # the last bytes taken, which may have a part of an empty line

    def __len__(self) -> int:
        return len(self._data) - self._start

    def add(self, data: bytes) -> None:
        """Append what has arrived."""
        self._data = self._data[self._start :] + data if self._start < len(self._data) else data
        self._start = 0

    def clear(self) -> None:
        """Drop everything."""
        self._data, self._start = b"", 0

    def take(self, body_left: int) -> memoryview:
        """Return the next slice; `body_left`: bytes that belong to a body of known length."""
        end = self._start + min(body_left, _BODY_SLICE_BYTES) if body_left else self._line_end()
        part = memoryview(self._data)[self._start : end]
        self._start += len(part)
        self._taken = b"" if body_left else (self._taken + bytes(part[-3:]))[-3:]
        return part

    def put_back(self, size: int) -> None:
        """Return the last bytes of the latest slice."""
        self._start -= size

    def _line_end(self) -> int:
        start = self._start
        border = (self._taken + self._data[start : start + 3]).find(_END)
        if border >= 0:
            return start + border + len(_END) - len(self._taken)
        found = self._data.find(_END, start, start + _SLICE_BYTES)
        return start + _SLICE_BYTES if found < 0 else found + len(_END)
