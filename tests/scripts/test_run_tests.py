"""A test that passes alone fails no run, and is named; whatever else fails does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_tests
from patience import PATIENCE

ONCE = "import os, pathlib, pytest\nseen = pathlib.Path('seen')\nfirst = not seen.exists()\nseen.touch()\n"
FLAKY = f"{ONCE}@pytest.mark.parametrize('by', ['a load [of 3::1]'])\ndef test_flaky(by):\n    assert not first\n"
NAME = "test_it.py::test_flaky[a load [of 3::1]]"
ALL = f"""{FLAKY}
def test_good(): pass
def test_bad(): assert False
def test_skipped_later(): assert not first and pytest.skip('later')
"""


def run(folder: Path, source: str, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit status of a run of a file of tests, and the lines about what failed."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p xdist\n")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-P", run_tests.__file__, *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return result.returncode, [line for line in result.stdout.splitlines() if line.startswith("quire: ")]


def test_what_passes_when_run_again_is_named_and_fails_nothing(tmp_path: Path) -> None:
    lines = [f"quire: failed, to be run again alone: {NAME}", f"quire: passed when run again: {NAME}"]
    assert run(tmp_path, FLAKY, "-n", "1") == (0, lines)


def test_what_fails_twice_or_is_not_run_again_fails_the_run(tmp_path: Path) -> None:
    status, lines = run(tmp_path, ALL)
    assert status == 1
    assert lines[3:] == [
        f"quire: passed when run again: {NAME}",
        "quire: failed twice: test_it.py::test_bad",
        "quire: failed, then was not run: test_it.py::test_skipped_later",
    ]


@pytest.mark.parametrize(
    ("source", "arguments", "wrong"),
    [
        (f"{ONCE}def test_it():\n    if first: os._exit(9)\n", ["-n", "1"], "test_it (its teardown, or a crash)"),
        (f"{ONCE}assert not first\ndef test_it(): pass\n", [], "test_it.py (its collection)"),
        (f"{ONCE}assert not first\ndef test_it(): pass\n", ["-n", "1"], "test_it.py (its collection)"),
        (
            f"{ONCE}@pytest.fixture\ndef end():\n    yield\n    assert not first\ndef test_it(end): pass\n", [],
            "test_it (its teardown, or a crash)",
        ),
        ("import pytest\n@pytest.mark.parametrize('i', range(21))\ndef test_it(i): assert 0\n", [], "test_it[20]"),
    ],
    ids=["crash", "collection", "collection-by-a-worker", "teardown", "many"],
)  # fmt: skip
def test_what_might_not_show_again_fails_the_run_at_once(
    tmp_path: Path, source: str, arguments: list[str], wrong: str
) -> None:
    status, lines = run(tmp_path, source, *arguments)
    assert status != 0
    assert lines[-1].endswith(wrong)
    assert all(line.startswith("quire: failed: ") for line in lines)


def test_a_crash_of_the_second_run_fails_the_run(tmp_path: Path) -> None:
    source = f"{ONCE}def test_it():\n    assert not first\n    os._exit(0)\n"
    status, lines = run(tmp_path, source)
    assert status == 1
    assert lines[-1] == "quire: failed, and one of these ended the process when run again: test_it.py::test_it"


def test_a_run_without_tests_fails(tmp_path: Path) -> None:
    assert run(tmp_path, "") == (pytest.ExitCode.NO_TESTS_COLLECTED, [])
