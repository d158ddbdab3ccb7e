"""The process that stands by: another one is started when it dies, after longer pauses if it dies again and again."""

from __future__ import annotations

import itertools
import threading
from typing import Any, cast

import pytest

from quire.frontend.client.launcher import EngineProcess
from quire.frontend.client.standby import Standby
from quire.frontend.errors import EngineDeadError, EngineStartError


class FakeProcess:
    """A process that can die."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def begin(self) -> bool:
        """Begin, if it lives."""
        return not self.ended.is_set()

    def exit_report(self, name: str) -> EngineDeadError:
        """Return how it has died."""
        return EngineDeadError(f"{name} was killed by SIGTERM", "it was process 7")


class Starts:
    """The starts of processes, and a clock; each dies when it has stood by for `lifetime` seconds."""

    def __init__(self, lifetime: float, *, fails: bool = False) -> None:
        self.now = 0
        self.times: list[int] = []
        self.standby = Standby(self._spawn)
        self._lifetime = lifetime
        self._fails = fails

    def run(self, seconds: int) -> None:
        """Let so many seconds pass, one a tick."""
        for _ in range(seconds):
            self.now += 1
            process = cast("Any", self.standby.process)
            if process is not None and self.now >= self.times[-1] + self._lifetime:
                process.ended.set()
            self.standby.tick(1.0)

    @property
    def pauses(self) -> list[int]:
        """The seconds from each start to the next."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    def _spawn(self) -> EngineProcess:
        self.times.append(self.now)
        if self._fails:
            raise EngineStartError("the engine process could not be started: no memory")
        return cast("EngineProcess", FakeProcess())


def test_a_process_that_dies_late_is_replaced_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts(lifetime=11)
    starts.run(40)
    assert starts.times == [2, 13, 24, 35]
    assert capsys.readouterr().err == 3 * "quire: the standby engine was killed by SIGTERM; starting another one\n"


def test_processes_that_die_in_a_row_are_replaced_after_longer_pauses(capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts(lifetime=1)
    starts.run(300)
    assert starts.pauses == [1, 3, 5, 9, 17, 33, 61, 61, 61]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "quire: the standby engine was killed by SIGTERM; starting another one"
    assert lines[2] == "quire: the standby engine was killed by SIGTERM, 3 times in a row; starting another one in 4 s"


def test_one_that_cannot_be_started_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts(lifetime=1, fails=True)
    starts.run(30)
    assert starts.pauses == [1, 2, 4, 8]
    assert "the standby engine is missing: the engine process could not be started" in capsys.readouterr().err


def test_an_engine_that_dies_with_it_finds_none_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts(lifetime=1)
    starts.run(2)
    cast("Any", starts.standby.process).ended.set()
    assert starts.standby.take() is None
    assert capsys.readouterr().err == "quire: the standby engine was killed by SIGTERM\n"
    starts.run(2)
    assert starts.times == [2, 4]
