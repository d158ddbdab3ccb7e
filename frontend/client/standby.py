"""The engine process that stands by to take the place of one that dies, and is replaced if it dies before."""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.client.engine_log import show
from quire.frontend.client.launcher import KILL_SECONDS, EngineProcess
from quire.frontend.errors import EngineStartError

_FIRST_SECONDS = 2.0  # of a new engine, after which a process is made to stand by
_HEALTHY_SECONDS = 10.0  # of standing by, after which a death is not one more in a row
_SECOND_PAUSE = 2.0  # after two deaths in a row; later pauses are twice as long each time
_LONGEST_PAUSE = 60.0
_NAME = "the standby engine"


class Standby:
    """The process that stands by, if there is one now.

    Time is what `tick` is told: while all processes are suspended none passes.
    """

    def __init__(self, spawn: Callable[[], EngineProcess]) -> None:
        """`spawn` starts such a process; raises `EngineStartError`."""
        self._spawn = spawn
        self._reset()

    def tick(self, seconds: float) -> None:
        """Start a process if it is time to, or note that it has died; every so many `seconds` of an engine's life."""
        if self.process is None:
            self._pause -= seconds
        elif self.process.ended.is_set():
            self._note_death(self.process.exit_report(_NAME).summary)
        else:
            self._age += seconds
        if self.process is None and self._pause <= 0:
            self._start()

    def take(self) -> EngineProcess | None:
        """Have the process begin, in the place of an engine that has died; return None if there is none that does."""
        process = self.process
        self._reset()
        return process if process is not None and begins(process, _NAME) else None

    def stop(self) -> None:
        """End the process, if there is one; another one is started as for a new engine."""
        process = self.process
        self._reset()
        if process is not None:
            process.stop(KILL_SECONDS)

    def _reset(self) -> None:
        self.process: EngineProcess | None = None
        self._num_deaths = 0  # in a row
        self._age = 0.0
        self._pause = _FIRST_SECONDS  # until the next one is started

    def _start(self) -> None:
        self._age = 0.0
        try:
            self.process = self._spawn()
        except EngineStartError as error:
            self._note_death(f"{_NAME} is missing: {error}")

    def _note_death(self, summary: str) -> None:
        self.process = None
        self._num_deaths = 1 if self._age >= _HEALTHY_SECONDS else self._num_deaths + 1
        is_first = self._num_deaths == 1
        self._pause = 0.0 if is_first else min(_LONGEST_PAUSE, _SECOND_PAUSE * 2.0 ** (self._num_deaths - 2))
        times = "" if is_first else f", {self._num_deaths} times in a row"
        show(f"quire: {summary}{times}; starting another one{f' in {self._pause:g} s' * (not is_first)}\n")


def begins(process: EngineProcess, name: str) -> bool:
    """Have a process that stands by begin; return False if it does not, and is ended."""
    if process.begin():
        return True
    if process.ended.is_set():
        show(f"quire: {process.exit_report(name).summary}\n")
    else:
        show(f"quire: {name} did not begin, and is ended\n")
        process.stop(0.0)
    return False
