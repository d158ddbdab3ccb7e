"""The ends of an answer that editors ask for: at a line that is indented too little, or after some time."""

from __future__ import annotations

import time
from collections.abc import Callable

_BLANKS = frozenset(" \t")


class Cutoff:
    """Ends an answer at a line with an indentation below `indent`, or at a line break `milliseconds` after it began.

    The first line may be indented by anything, since it continues the prompt's last one. What is None or 0 ends
    nothing. `clock`: seconds, as `time.monotonic()`.
    """

    def __init__(
        self, indent: int | None, milliseconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._indent = indent or 0
        self._seconds = (milliseconds or 0.0) / 1e3
        self._clock = clock
        self._began: float | None = None
        self._depth: int | None = None  # blanks of the line so far, None behind them or in the first line

    def feed(self, text: str) -> tuple[str, bool]:
        """Return what belongs to the answer of a piece of it, and whether that is its end."""
        if self._began is None:
            self._began = self._clock()
        if self._indent > 0:
            for position, character in enumerate(text):
                if self._is_too_shallow(character):
                    return text[:position], True
        is_late = self._seconds > 0 and self._clock() - self._began > self._seconds
        return text, is_late and "\n" in text

    def _is_too_shallow(self, character: str) -> bool:
        """Take the next character; return whether it begins a line that is indented too little."""
        if self._depth is not None and character not in _BLANKS:
            if self._depth < self._indent:
                return True
            self._depth = None
        if character == "\n":
            self._depth = 0
        elif self._depth is not None:
            self._depth += 1
        return False
