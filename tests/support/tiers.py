"""Tiers of the tests: all of them, or so few cases of each test that a run takes minutes.

`durations.txt` has what each test takes with all its cases. The quick tier has all cases of tests that take `BUDGET`
seconds or less, as many cases of the others as fit into that, and none of tests whose cases take longer each than
`LONGEST`. Which cases of a test it has depends on their names alone. What it leaves out is divided into `SHARES`, one
of which can be added.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

DURATIONS = Path(__file__).parents[1] / "durations.txt"
BUDGET = 1.0
LONGEST = 2.0
SHARES = 6


@dataclass(frozen=True)
class Duration:
    """Seconds that all cases of a test take together, and their number."""

    seconds: float
    cases: int


def function_of(name: str) -> str:
    """Return the test that a case belongs to, by the name that pytest has for it: `tests/test_x.py::test_y[case]`."""
    return name.split("[", 1)[0]


def read_durations(file: Path = DURATIONS) -> dict[str, Duration]:
    """Read lines of seconds, cases, and the name of a test. Raises OSError and ValueError."""
    found = {}
    for line in file.read_text().splitlines():
        seconds, cases, name = line.split(maxsplit=2)
        found[name] = Duration(float(seconds), int(cases))
    return found


def format_durations(seconds: Mapping[str, float], least: float = 0.5) -> str:
    """Return the lines for cases that took so many seconds; tests of less than `least` are left out."""
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in seconds.items():
        totals[function_of(name)].append(value)
    lines = [f"{sum(values):.1f} {len(values)} {name}" for name, values in sorted(totals.items())]
    return "".join(f"{line}\n" for line in lines if float(line.split()[0]) >= least)


def quick_names(names: Iterable[str], durations: Mapping[str, Duration]) -> set[str]:
    """Return the cases that the quick tier has; tests of unknown duration are among them."""
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        cases[function_of(name)].append(name)
    chosen: set[str] = set()
    for function, all_of_them in cases.items():
        known = durations.get(function)
        chosen.update(sorted(all_of_them, key=_number)[: _count(len(all_of_them), known)])
    return chosen


def _count(cases: int, known: Duration | None) -> int:
    if known is None or known.seconds <= BUDGET:
        return cases
    if known.seconds / known.cases > LONGEST:
        return 0
    return max(1, math.floor(cases * BUDGET / known.seconds))


def tier(names: list[str], tier_name: str, durations: Mapping[str, Duration]) -> set[str]:
    """Return the cases of a tier: `full`, `quick`, or `quick+TEXT`, which adds the share that the text stands for.

    Raises ValueError for another name.
    """
    kind, plus, text = tier_name.partition("+")
    if tier_name == "full":
        return {*names}
    if kind != "quick":
        raise ValueError(f"the tier is {tier_name!r}; it must be full, quick, or quick+TEXT")
    chosen = quick_names(names, durations)
    if plus:
        share = _number(text) % SHARES
        chosen |= {name for name in names if _number(name) % SHARES == share}
    return chosen


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
