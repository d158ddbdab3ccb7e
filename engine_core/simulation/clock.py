"""Time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the simulation began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now
