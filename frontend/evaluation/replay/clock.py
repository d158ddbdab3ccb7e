"""The clock of a run."""

from __future__ import annotations

import time


class Clock:
    """Seconds since it was made, of the monotonic clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begin

    def of(self, timestamp: float) -> float:
        """`timestamp` of `time.monotonic()` as seconds since the run began."""
        return timestamp - self.begin
