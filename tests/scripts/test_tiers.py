"""The tiers of the tests: what they have together, and how long they take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiers
from tiers import Duration

NAMES = [
    *(f"t.py::test_fast[{n}]" for n in range(50)),
    *(f"t.py::test_matrix[{n} [of 300]]" for n in range(300)),
    *(f"t.py::test_slow[{n}]" for n in range(4)),
    "t.py::test_new",
]
DURATIONS = {
    "t.py::test_fast": Duration(0.9, 50),
    "t.py::test_matrix": Duration(300.0, 300),
    "t.py::test_slow": Duration(80.0, 4),
}


def test_quick_tier_has_some_cases_of_each_test() -> None:
    quick = tiers.tier(NAMES, "quick", DURATIONS)
    assert {name for name in NAMES if "fast" in name or "new" in name} < quick
    assert len([name for name in quick if "matrix" in name]) == int(tiers.BUDGET)
    assert not [name for name in quick if "slow" in name]
    assert tiers.tier(NAMES[::-1], "quick", DURATIONS) == quick
    assert tiers.tier(NAMES, "full", DURATIONS) == {*NAMES}


def test_shares_have_all_tests_together() -> None:
    quick = tiers.tier(NAMES, "quick", DURATIONS)
    shares = {frozenset(tiers.tier(NAMES, f"quick+{text}", DURATIONS) - quick) for text in range(60)}
    assert len(shares) == tiers.SHARES
    assert quick | {name for share in shares for name in share} == {*NAMES}
    assert sum(map(len, shares)) == len(NAMES) - len(quick)


@pytest.mark.parametrize("name", ["slow", "fullest", "quick-1", ""])
def test_unknown_tier(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r}; it must be full, quick, or"):
        tiers.tier(NAMES, name, DURATIONS)


def test_durations_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "durations.txt").write_text(
        tiers.format_durations({"a/b.py::test[a b]": 1.25, "a/b.py::test[c::d [e]]": 2.0, "a/b.py::test_fast": 0.4})
    )
    assert tiers.read_durations(tmp_path / "durations.txt") == {"a/b.py::test": Duration(3.2, 2)}


def test_known_tests_are_there() -> None:
    """`durations.txt` names tests of this folder; whoever renames one renames it there."""
    root = Path(tiers.DURATIONS).parents[1]
    durations = tiers.read_durations()
    assert len(durations) > 100
    for name in durations:
        file, *path = name.split("::")
        assert path[0] in re.findall(r"\w+", (root / file).read_text()), name  # a function, or a class of hypothesis
