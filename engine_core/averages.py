"""Moving averages of measured times and rates."""

from __future__ import annotations

_WEIGHT = 0.1  # of a new measurement


def blend(old: float, new: float) -> float:
    """Return the moving average; a step that happens to take many times as long as it should hardly counts."""
    return old + _WEIGHT * (min(new, 2 * old) - old) if old else new
