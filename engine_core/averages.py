"""Moving averages of measured times and rates."""

from __future__ import annotations

_WEIGHT = 0.1  # of a step


def average(old: float, new: float, weight: float) -> float:
    """Return the moving average with a new measurement of this weight; the first one counts as a whole."""
    return old + weight * (new - old) if old else new


def blend(old: float, new: float) -> float:
    """Return the moving average; a step that happens to take many times as long as it should hardly counts."""
    return average(old, min(new, 2 * old) if old else new, _WEIGHT)
