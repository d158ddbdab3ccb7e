"""Nothing is lost, whatever goes wrong: seeded runs of the whole; `scripts/robustness.py faults` has more of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_simulation.simulation import run, silence

SEEDS_AT_ONCE = 150
KINDS = 28  # of faults, at least
RARE = {"supervisor killed", "standby stopped", "standby killed"}
PAGES = {
    "taken over from memory",
    "damaged in memory",
    "written, of the disk",
    "read, of the disk",
    "evicted, of the disk",
}
FOUND = {
    "an engine that is ready as it is given up tells clients that it shuts down": 510,
    "a suspended client gives up an engine for which it has not waited": 1125,
    "a process that stands by and is stopped keeps the engine from coming back": 30,
}
"""Seeds that have found a bug, by what it did."""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    with silence():
        yield


@pytest.mark.parametrize("first", [0, SEEDS_AT_ONCE])
def test_whatever_goes_wrong_each_request_ends_once_as_if_undisturbed(first: int) -> None:
    outcomes = [run(seed) for seed in range(first, first + SEEDS_AT_ONCE)]
    assert {outcome.seed: outcome.problems for outcome in outcomes if outcome.problems} == {}
    injected = sum((outcome.injected for outcome in outcomes), Counter[str]())
    assert len(injected) >= KINDS
    assert set(injected) >= RARE
    num_pages = sum((outcome.num_pages for outcome in outcomes), Counter[str]())
    assert {name for name, count in num_pages.items() if count > 5} >= PAGES


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND.keys())
def test_a_bug_that_was_found_stays_mended(seed: int) -> None:
    assert run(seed).problems == []


def test_a_seed_does_the_same_again_even_in_another_process() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent / 'support')!r})\n"
        "from fault_simulation.simulation import run, silence\n"
        "with silence():\n    traces = [run(seed, is_traced=True).trace for seed in (3, 9)]\n"
        "print(traces)"
    )
    here = [run(seed, is_traced=True).trace for seed in (3, 9)]
    assert len(here[0]) > 10
    answer = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True)
    assert answer.stdout == f"{here}\n"  # and no library prints more
