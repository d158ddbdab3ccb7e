"""The statistics of several engines as those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BOUNDS = "bounds"  # of buckets, which are the same everywhere


def total(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of all numbers, at any depth. Raises `RuntimeError` if there are none to add."""
    if not stats:
        raise RuntimeError("no replica of the engine has answered; there may be none now")
    return {name: _sum(name, [each[name] for each in stats if name in each]) for name in stats[0]}


def _sum(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name == _BOUNDS or isinstance(first, str) or first is None:
        return first
    if isinstance(first, Mapping):
        return total(values)
    if isinstance(first, list):
        longest = max(map(len, values))
        return [_sum("", [value[index] for value in values if index < len(value)]) for index in range(longest)]
    return sum(values)
