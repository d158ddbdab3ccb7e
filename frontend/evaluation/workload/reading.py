"""Reader of traces, row by row."""

from __future__ import annotations

import math
import stat
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from quire.frontend.evaluation.workload.formats import FORMATS, Format, detect, has_header, parser_for
from quire.frontend.evaluation.workload.lines import MOST_LINE_BYTES, Lines, TraceError
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.rows import RowParser

MOST_REASONS = 5
"""Number of reasons for skipped rows that are kept."""

_MOST_SECONDS = 366 * 86400.0  # of a trace: one wrong date must not put all rows below it out of order
_SKIP = "correct the line, or skip bad ones with --skip-bad"


def read_trace(
    path: Path,
    *,
    format: str | None = None,  # noqa: A002 - the name users know
    skip_bad: bool = False,
    start: float = 0.0,
    duration: float | None = None,
    max_requests: int | None = None,
) -> Trace:
    """Return the requests from `start` on for `duration` seconds (of the trace's time), at most `max_requests`.

    `format` is one of `FORMATS`, or None to detect it from the first line. Raises TraceError if the file is not
    readable, is of no known format or lacks a column; bad rows are found while iterating. Raises ValueError for
    arguments out of range.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; it can be {', '.join(FORMATS)}, or None to detect it")
    if not 0 <= start < math.inf:
        raise ValueError(f"start={start} is out of range; it must be a finite number of seconds of at least 0")
    if duration is not None and not duration > 0:
        raise ValueError(f"duration={duration} is out of range; it must be more than 0 seconds, or None for no limit")
    if max_requests is not None and max_requests < 1:
        raise ValueError(f"max_requests={max_requests} is out of range; it must be at least 1, or None for no limit")
    return Trace(path, format, skip_bad, start, math.inf if duration is None else start + duration, max_requests)


class Trace:
    """Iterable over the requests of a file in order of arrival, which holds one line of it at a time.

    The first row is at time 0; arrivals count from `start`. Iterating again is possible unless the file is a pipe. Bad
    rows raise TraceError, or are skipped: `num_skipped` counts them and `reasons` has the first few. A trace without
    any request raises TraceError too.
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
        """True if the trace comes from a pipe and can be read only once."""
        return _is_stream(self.path)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        self._forget()
        with closing(self._good_rows()) as rows:
            yield from self._selected(rows)

    def _selected(self, rows: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
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
        """Yield rows with the file's own times, which never decrease."""
        with Lines(self.path) as lines:
            parser, rest = self._begin(lines)
            first: float | None = None
            previous: float | None = None
            for number, line in rest:
                try:
                    request = _parsed(parser, line, first, previous)
                except ValueError as error:
                    self._skip(number, error)
                    continue
                previous = request.arrival
                first = previous if first is None else first
                yield request

    def _begin(self, lines: Lines) -> tuple[RowParser, Iterator[tuple[int, bytes | None]]]:
        """Return a parser for the file, and the lines for it."""
        number, first = next(lines, (0, None))
        if not number:
            raise TraceError(f"{self.path} is empty; give a trace with at least one request")
        if first is None and (self.format is None or has_header(self.format)):
            raise TraceError(f"{self.path}:{number}: {_too_long()}")
        try:
            self.format = self.format or detect(first or b"")
            parser = parser_for(self.format, first or b"")
        except ValueError as error:
            raise TraceError(f"{self.path}:{number}: {error}") from error
        return parser, lines if has_header(self.format) else chain([(number, first)], lines)

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
                f"the last row that was read is at {last:g} s"
            )
        if self.num_skipped:
            return f"{self.path}: all of its {self.num_skipped} rows are bad; the first: {self.reasons[0]}"
        return f"{self.path} has no requests; give a trace with at least one"

    def _forget(self) -> None:
        self.num_skipped = 0
        self.reasons = []


def _is_stream(path: Path) -> bool:
    """Return True for a pipe or a terminal, which can be read only once."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _parsed(parser: RowParser, line: bytes | None, first: float | None, previous: float | None) -> WorkloadRequest:
    if line is None:
        raise ValueError(_too_long())
    request = parser.parse(line, previous)
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
