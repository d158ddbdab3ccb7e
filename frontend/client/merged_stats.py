"""Statistics of several engines as those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ALIKE = ("bounds", "block_size")  # are the same of all engines


def merged(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the numbers in statistics, as the utility call `stats` gives them, of each engine."""
    if len(each) == 1:
        return dict(each[0])
    names = dict.fromkeys(name for stats in each for name in stats)
    return {name: _merge(name, [stats[name] for stats in each if name in stats]) for name in names}


def _merge(name: str, values: list[Any]) -> Any:
    first = values[0]
    if name in _ALIKE or isinstance(first, str | None):
        return first
    if isinstance(first, Mapping):
        return merged(values)
    if isinstance(first, list):
        longest = max(map(len, values))
        return [sum(value[index] for value in values if index < len(value)) for index in range(longest)]
    return sum(values)
