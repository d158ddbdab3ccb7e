"""Reads traces of real workloads, row by row."""

from __future__ import annotations

import math
import stat
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from quire.frontend.evaluation.workload.errors import TraceError
from quire.frontend.evaluation.workload.formats import FORMATS, Format, detect, has_header, rows_of
from quire.frontend.evaluation.workload.lines import MOST_LINE_BYTES, Lines
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.rows import Rows

MOST_REASONS = 5
"""Reasons for skipped rows that are kept."""

_MOST_SECONDS = 366 * 86400.0  # of a trace: one wrong date must not put all rows below it out of order
_SKIP = "correct the line, or skip bad ones with --skip-bad"


def read_trace(
    path: Path,
    *,
    format: str | None = None,  # noqa: A002 - the user's word for it
    skip_bad: bool = False,
    start: float = 0.0,
    duration: float | None = None,
    max_requests: int | None = None,
) -> Trace:
    """The requests that came from `start` on for `duration` seconds (of the trace's time), `max_requests` at most.

    `format` is one of `FORMATS`, None: as the first line shows. Raises TraceError if the file can't be read, is of no
    known format or lacks a column; bad rows are met while iterating. Raises ValueError for arguments out of range.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format={format!r} is not known; it can be {', '.join(FORMATS)}, or None to look at the file")
    if not 0 <= start < math.inf:
        raise ValueError(f"start={start} is out of range; it must be a finite number of seconds of at least 0")
    if duration is not None and not duration > 0:
        raise ValueError(f"duration={duration} is out of range; it must be more than 0 seconds, or None for no limit")
    if max_requests is not None and max_requests < 1:
        raise ValueError(f"max_requests={max_requests} is out of range; it must be at least 1, or None for no limit")
    return Trace(path, format, skip_bad, start, math.inf if duration is None else start + duration, max_requests)


class Trace:
    """Iterates over the requests of a file in order of arrival, and holds one line of it at a time.

    The first row came at 0, and the requests arrive so long after `start`. It may be iterated over again if the file is
    no pipe. Bad rows raise TraceError, or are skipped: `num_skipped` counts them and `reasons` tells of the first few.
    It is an error as well if there is no request in the end.
    """

    def __init__(
        self, path: Path, known: Format | None, skip_bad: bool, start: float, end: float, max_requests: int | None
    ) -> None:
        self.path = path
        self.format = known
        self.num_skipped = 0
        self.reasons: list[str] = []
        self._skip_bad = skip_bad
        self._start = start
        self._end = end
        self._max_requests = max_requests
        if not self.is_stream:
            with Lines(path) as lines:
                self._begin(lines)

    @property
    def is_stream(self) -> bool:
        """Whether it can be iterated over only once, as it comes from a pipe."""
        return _is_stream(self.path)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        self._forget()
        with closing(self._good_rows()) as rows:
            yield from self._chosen(rows)

    def _chosen(self, rows: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        num_requests, time, origin = 0, 0.0, None
        for row in rows:
            origin = row.arrival if origin is None else origin
            time = row.arrival - origin
            if time >= self._end:
                break
            if time >= self._start:
                yield replace(row, arrival=time - self._start)
                num_requests += 1
                if num_requests == self._max_requests:
                    return
        if not num_requests:
            raise TraceError(self._nothing(origin is not None, time))

    def _good_rows(self) -> Generator[WorkloadRequest, None, None]:
        """Rows with the file's own times, none of which is before the one above it."""
        with Lines(self.path) as lines:
            rows, rest = self._begin(lines)
            first: float | None = None
            previous: float | None = None
            for number, line in rest:
                try:
                    request = _parsed(rows, line, first, previous)
                except ValueError as error:
                    self._skip(number, error)
                    continue
                previous = request.arrival
                first = previous if first is None else first
                yield request

    def _begin(self, lines: Lines) -> tuple[Rows, Iterator[tuple[int, bytes | None]]]:
        """The reader of the file, and the lines that it is to read."""
        number, first = next(lines, (0, None))
        if not number:
            raise TraceError(f"{self.path} is empty; give a trace with at least one request")
        if first is None and (self.format is None or has_header(self.format)):
            raise TraceError(f"{self.path}:{number}: {_too_long()}")
        try:
            self.format = self.format or detect(first or b"")
            rows = rows_of(self.format, first or b"")
        except ValueError as error:
            raise TraceError(f"{self.path}:{number}: {error}") from error
        return rows, lines if has_header(self.format) else chain([(number, first)], lines)

    def _skip(self, number: int, error: ValueError) -> None:
        reason = f"{self.path}:{number}: {error}"
        if not self._skip_bad:
            raise TraceError(f"{reason}; {_SKIP}") from error
        self.num_skipped += 1
        if len(self.reasons) < MOST_REASONS:
            self.reasons.append(reason)

    def _nothing(self, has_rows: bool, last: float) -> str:
        if has_rows:
            return (
                f"{self.path} has no requests from {self._start:g} s to {self._end:g} s; "
                f"the last that was looked at came at {last:g} s"
            )
        if self.num_skipped:
            return f"{self.path}: all of its {self.num_skipped} rows are bad; the first: {self.reasons[0]}"
        return f"{self.path} has no requests; give a trace with at least one"

    def _forget(self) -> None:
        self.num_skipped = 0
        self.reasons = []


def _is_stream(path: Path) -> bool:
    """Whether what it holds can be read only once."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _parsed(rows: Rows, line: bytes | None, first: float | None, previous: float | None) -> WorkloadRequest:
    if line is None:
        raise ValueError(_too_long())
    request = rows.parse(line, previous)
    if previous is not None and first is not None:
        if request.arrival < previous:
            raise ValueError(
                f"its time is {previous - request.arrival:g} s before that of the row above; rows must be in order"
            )
        if request.arrival - first > _MOST_SECONDS:
            raise ValueError(f"its time is {request.arrival - first:g} s after the first row's; it may be a year")
    return request


def _too_long() -> str:
    return f"the line is longer than {MOST_LINE_BYTES} bytes; a request must be one line"
