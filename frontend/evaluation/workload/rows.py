"""Rows of a trace: the interface of their parsers, the columns of CSV tables, and checks of values."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Protocol

from quire.frontend.evaluation.workload.request import WorkloadRequest

MOST_TOKENS = 1 << 24
"""Upper limit on a prompt's or an answer's tokens: above any model's, and small enough to name a prompt's blocks."""

_MOST_SHOWN = 60  # characters of a value that a message repeats


class RowParser(Protocol):
    """Parser of the rows of one format."""

    def parse(self, line: bytes, previous: float | None, /) -> WorkloadRequest:
        """Return the request of a row, its arrival in seconds on the file's own clock.

        `previous` is the time of the row above, None for the first row. Raises ValueError for a bad row.
        """


class CsvColumns:
    """Columns of a table, picked by their names in the header.

    Raises ValueError that names the columns of `needed` that are missing; a missing column of `optional` is None.
    """

    def __init__(self, header: bytes, needed: Sequence[str], optional: Sequence[str] = ()) -> None:
        names = header_names(header)
        missing = [name for name in needed if name not in names]
        if missing:
            raise ValueError(
                f"there is no column {', '.join(missing)} among {', '.join(names)}; "
                f"the columns must be {', '.join(needed)}"
            )
        self.places = [names.index(name) for name in needed]
        self.optional = [names.index(name) if name in names else None for name in optional]
        self._count = len(names)

    def split(self, line: bytes) -> list[str]:
        """Return the cells of a row. Raises ValueError unless there are as many as in the header."""
        text = line.decode()
        cells = _unquoted(text) if '"' in text else text.split(",")
        if len(cells) != self._count:
            raise ValueError(f"there are {len(cells)} columns; the header has {self._count}")
        return cells


def header_names(header: bytes) -> list[str]:
    """Return the names of a table's columns. Raises ValueError."""
    return [name.strip() for name in _unquoted(header.decode())]


def _unquoted(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise ValueError(f"{shown(text)} is no row of a table: {error}") from None


def shown(value: object) -> str:
    """Return a value as an error message repeats it: cut if long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def whole_number(name: str, text: str) -> int:
    """Return the whole number of a cell; some tools write 374.0. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        if (number := float(text)).is_integer():
            return int(number)
    except ValueError:
        pass
    raise ValueError(f"{name} is {shown(text)}; it must be a whole number")


def check_length(name: str, tokens: int) -> None:
    """Raise ValueError for a length in tokens that no request has."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{name} is {shown(tokens)}; it must be a whole number from 1 to {MOST_TOKENS}")


def check_seconds(name: str, seconds: float) -> None:
    """Raise ValueError unless this is a finite time of at least 0."""
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {shown(seconds)}; it must be a finite number of at least 0")
