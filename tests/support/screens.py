"""A terminal's screen, as far as the command line uses one."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PIECE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[\d;]*m|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen:
    """Rows of text of any number. A line that is longer than the screen is wide is an error: nothing may wrap."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.rows = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Write text with escape sequences; a line break moves to the first column, as a terminal's driver lets it."""
        place = 0
        while place < len(text):
            piece = _PIECE.match(text, place)
            assert piece is not None, f"what is {text[place : place + 20]!r}?"
            place = piece.end()
            number, command, back, feed, words = piece.groups()
            if command and command != "m":
                self._do(command, int(number or 1))
            elif back or feed:
                self._column = 0
                self._row += bool(feed)
                self.rows += [""] * (self._row + 1 - len(self.rows))
            elif words:
                self._write(words)

    @property
    def text(self) -> str:
        """All rows, without spaces at their ends."""
        return "\n".join(row.rstrip() for row in self.rows)

    def _do(self, command: str, number: int) -> None:
        if command == "A":
            assert number <= self._row, "the cursor leaves the screen"
            self._row -= number
        elif command in "KJ":
            self.rows[self._row] = _cut(self.rows[self._row], self._column)
            if command == "J":
                del self.rows[self._row + 1 :]
        else:
            raise AssertionError(f"unknown command {command}")

    def _write(self, words: str) -> None:
        row = self.rows[self._row]
        assert cell_len(_cut(row, self._column)) == self._column
        rest = row[len(_cut(row, self._column + cell_len(words))) :]
        self.rows[self._row] = _cut(row, self._column) + words + rest
        self._column += cell_len(words)
        assert self._column < self.columns, f"{words!r} would wrap"


def _cut(row: str, columns: int) -> str:
    """Return as many characters as fit into these columns."""
    end = 0
    while end < len(row) and cell_len(row[: end + 1]) <= columns:
        end += 1
    return row[:end]
