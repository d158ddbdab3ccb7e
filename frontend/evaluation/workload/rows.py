"""What the reader of a format is."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Protocol

from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.values import shown


class Rows(Protocol):
    """Reads the rows of one format."""

    def parse(self, line: bytes, previous: float | None, /) -> WorkloadRequest:
        """The request of a row, whose arrival is in seconds of the file's own clock.

        `previous` is the time of the row above, None in the first. Raises ValueError for a row that is bad.
        """


class Columns:
    """Picks the columns of a table by their names in its header.

    Raises ValueError, naming them, if one of `needed` is not there; one of `optional` that is not there is empty.
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
        """The cells of a row, as many as the header has. Raises ValueError."""
        text = line.decode()
        cells = _unquoted(text) if '"' in text else text.split(",")
        if len(cells) != self._count:
            raise ValueError(f"there are {len(cells)} columns; the header has {self._count}")
        return cells


def header_names(header: bytes) -> list[str]:
    """The names of a table's columns. Raises ValueError."""
    return [name.strip() for name in _unquoted(header.decode())]


def _unquoted(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise ValueError(f"{shown(text)} is no row of a table: {error}") from None
