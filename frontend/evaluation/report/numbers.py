"""Formatting of numbers: three digits, separated thousands, a unit that suits the size."""

from __future__ import annotations

import math

NONE = "–"  # noqa: RUF001 - where there is no figure


def number(value: float | None) -> str:
    """Format with three digits, whole from a hundred on: 1.23, 12.3, 123, 12,345."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == int(value) or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.995 else f"{value:.{1 if abs(value) >= 9.995 else 2}f}"


def time(ms: float | None) -> str:
    """Format milliseconds in the unit that suits them: 0.43 ms, 212 ms, 1.43 s, 2.5 min."""
    if ms is None or not math.isfinite(ms):
        return NONE
    for size, unit in ((3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if abs(ms) >= size * 0.9995:
            return f"{number(ms / size)} {unit}"
    return f"{number(ms)} ms"


def percent(share: float | None) -> str:
    """Format a share of 1 in percent: 33 %, 99.2 %."""
    if share is None or not math.isfinite(share):
        return NONE
    return f"{100 * share:.3g} %"


def ratio(value: float | None, base: float | None) -> str:
    """Format the ratio of a value to a base: 1.25x; empty where it means nothing."""
    if value is None or base is None or not math.isfinite(value) or not math.isfinite(base) or base <= 0:
        return ""
    return f"{value / base:.2f}x" if value / base < 10 else f"{value / base:,.0f}x"
