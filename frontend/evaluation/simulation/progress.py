"""Progress display of a simulation."""

from __future__ import annotations

import os
import sys
import time

_LIVE_SECONDS = 0.25
_PLAIN_SECONDS = 10.0
_USUAL_COLUMNS = 80


class SimulationProgress:
    """A line on stderr that is updated in place on a terminal, else a line every ten seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_live = sys.stderr.isatty()
        self._begun = self._shown = time.monotonic()

    def __enter__(self) -> SimulationProgress:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._is_live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def show(self, virtual: float, requests: int) -> None:
        """Show, if it is time to, the virtual seconds that have passed and the requests that have ended."""
        now = time.monotonic()
        if now - self._shown < (_LIVE_SECONDS if self._is_live else _PLAIN_SECONDS):
            return
        self._shown = now
        line = progress_line(self._title, virtual, requests, now - self._begun)
        if self._is_live:  # a line that wraps would leave one behind at each update
            line = line[: _columns() - 1]
        sys.stderr.write(f"\r{line}\x1b[K" if self._is_live else f"{line}\n")
        sys.stderr.flush()


def _columns() -> int:
    """Return the width of the terminal at stderr."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS


def progress_line(title: str, virtual: float, requests: int, seconds: float) -> str:
    """Return a line with the virtual seconds, the ended requests, and their rate over `seconds` of real time."""
    return f"{title}: {virtual:.0f} s simulated, {requests} requests ended, {requests / seconds:.0f} a second"
