"""Progress bars at terminals of any width: a row never wraps, or each update would leave lines behind."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stderr

import pytest

from quire.frontend import progress
from quire.frontend.evaluation.simulation import progress as simulation

WIDTHS = [20, 40, 58, 60, 61, 62, 68, 79, 80, 100]
NAME = "some-organization/Some-Model-With-A-Long-Name-135M-Instruct"


class FakeTerminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(params=WIDTHS)
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    stream = FakeTerminal()
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm")
    return stream


def rows(terminal: FakeTerminal) -> list[str]:
    """Return what each update has written, without escape sequences."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue()).split("\r")


def check(terminal: FakeTerminal, first: str) -> None:
    assert terminal.getvalue().count("\n") == 1, "a line break at the end alone"
    assert not re.search(r"\x1b\[\d*A", terminal.getvalue()), "no row above the last"
    columns = int(os.environ["COLUMNS"])
    shown = [row.rstrip("\n") for row in rows(terminal) if row.strip()]
    assert shown
    assert max(map(len, shown)) <= columns
    if columns >= 40:
        assert first in shown[-1]


def test_the_bar_of_a_batch_is_one_row(terminal: FakeTerminal) -> None:
    with redirect_stderr(terminal), progress.progress_bar(20, wanted=True) as advance:
        for _ in range(20):
            advance(2, 1)
    check(terminal, "Processed prompts ")
    if int(os.environ["COLUMNS"]) >= 40:
        assert "20/20" in rows(terminal)[-1]


def test_the_bar_of_a_download_is_one_row(terminal: FakeTerminal) -> None:
    with redirect_stderr(terminal), progress.download_bar(NAME, "main", 10**11) as advance:
        for _ in range(10):
            advance(10**10)
    check(terminal, "100.0/100.0 GB")


def test_the_line_of_a_simulation_is_one_row(monkeypatch: pytest.MonkeyPatch, terminal: FakeTerminal) -> None:
    columns = int(os.environ["COLUMNS"])
    monkeypatch.setattr(simulation, "_columns", lambda: columns)
    monkeypatch.setattr(simulation, "_LIVE_SECONDS", 0.0)
    with redirect_stderr(terminal), simulation.SimulationProgress("least-loaded, 8 replicas") as shown:
        shown.show(12345.0, 678901)
    line = rows(terminal)[1]
    assert len(line) < columns
    assert "least-loaded, 8 replicas: 12345 s simulated".startswith(line[:40])
