"""Run pytest, then those tests that failed once more, alone: a busy machine fails no run, and nothing is hidden.

    .venv/bin/python scripts/run_tests.py -n 2 --dist worksteal

Arguments are pytest's. The exit status is 0 if every test passed, together with the others or alone. What might not
show again counts at once: errors of the collection, a worker that crashed, and errors of fixtures that end, which may
be other tests'. So do many failures, which are no accident.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest

MOST_FAILURES = 20


class Outcomes:
    """Plugin of pytest: the tests that passed and failed, and what is wrong whether or not a test fails again."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: dict[str, None] = {}  # in their order
        self.wrong: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a phase of a test; xdist reports a crash as a phase of its own."""
        if report.passed and report.when == "call":
            self.passed.add(report.nodeid)
        elif report.failed and report.when in {"setup", "call"}:
            self.failed[report.nodeid] = None
        elif report.failed:
            self.wrong.append(f"{report.nodeid} (its teardown, or a crash)")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note an error of the collection."""
        if report.failed:
            self.wrong.append(f"{report.nodeid} (its collection)")


def say(what: str, names: Iterable[str]) -> None:
    """Print one line for each name."""
    for name in names:
        print(f"quire: {what}: {name}", flush=True)


def run_once(arguments: list[str]) -> tuple[int, Outcomes]:
    """Run pytest; return its exit status, and the outcomes."""
    outcomes = Outcomes()
    return int(pytest.main(arguments, plugins=[outcomes])), outcomes


def run(arguments: list[str]) -> int:
    """Run pytest, and what failed once more; return the exit status."""
    status, first = run_once(arguments)
    if status != pytest.ExitCode.TESTS_FAILED or first.wrong or not 0 < len(first.failed) <= MOST_FAILURES:
        say("failed", [*first.failed, *first.wrong])
        return status
    say("failed, to be run again alone", first.failed)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:  # knows nothing of the first run
            status, again = fresh.submit(run_once, [*first.failed]).result()
    except BrokenProcessPool:
        print()  # ends the line of pytest
        say("failed, and one of these ended the process when run again", first.failed)
        return int(pytest.ExitCode.TESTS_FAILED)
    passed = [name for name in first.failed if name in again.passed and name not in again.failed]
    say("passed when run again", passed)
    say("failed twice", again.failed)
    say("failed", again.wrong)
    say("failed, then was not run", first.failed.keys() - again.failed.keys() - {*passed})
    return status or int(bool(again.wrong) or len(passed) < len(first.failed))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
