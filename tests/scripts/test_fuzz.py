"""Targets of `scripts/robustness.py fuzz`: their seeds, and inputs with a wrong value, without coverage guidance."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import fuzz
import pytest
from fuzzing.target import Target
from fuzzing.targets import TARGETS
from patience import PATIENCE


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_passes_what_it_starts_from_and_mutants_of_it(name: str) -> None:
    with fuzz.target_of(name) as target:
        check_mutants(target, TARGETS[name].num_mutants)


def check_mutants(target: Target, count: int) -> None:
    chance = random.Random(7)
    seeds = list(target.seeds())
    for seed in seeds:
        target.test(seed)
    for _ in range(count):
        mutant = chance.choice(seeds)
        for _ in range(chance.randint(1, 3)):
            with suppress(ValueError, RecursionError):
                mutant = target.mutate(mutant, chance)
        target.test(mutant)


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_fit_the_limit_of_an_input(name: str) -> None:
    with fuzz.target_of(name) as made:
        assert max(map(len, made.seeds())) < TARGETS[name].max_bytes


def run_fuzzer(folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script for a few seconds."""
    return subprocess.run(
        [sys.executable, "-c", f"import fuzz\n{before}\nfuzz.main()", "traces", "--seconds=3", f"--folder={folder}"],
        env={**os.environ, "PYTHONPATH": str(Path(fuzz.__file__).parent)},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed; `pip install '.[fuzz]'` brings it"
)


@needs_atheris
def test_the_fuzzer_runs_for_the_given_time_and_keeps_a_corpus(tmp_path: Path) -> None:
    done = run_fuzzer(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Done" in done.stderr
    assert any((tmp_path / "traces" / "corpus").iterdir())


@needs_atheris
def test_the_fuzzer_keeps_an_input_that_fails(tmp_path: Path) -> None:
    with_bug = """
from fuzzing.traces import Traces
check = Traces._check
Traces._check = lambda self, request: check(self, request) if request.output_tokens in (5, 44, 109, 18, 9) else 1 / 0
"""
    done = run_fuzzer(tmp_path, with_bug)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stdout + done.stderr
    (failing,) = (tmp_path / "traces").glob("crash-*")
    fuzz.replay("traces", [failing])  # without the bug it passes
