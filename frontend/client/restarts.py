"""Restarts of an engine: how often it has died lately, how long to wait before the next start, and when to give up."""

from __future__ import annotations

from collections.abc import Callable

_HEALTHY_SECONDS = 2.0  # of life, at least
_HEALTHY_STARTS = 2  # and as many times the time of its start
_RESTARTS_AT_ONCE = 2  # without a pause; later pauses are twice as long each time
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


class Restarts:
    """The deaths in a row of engines that have not lived long.

    Those that are explained by a request do not count: that request ends soon, and nobody waits for it.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """`most`: such deaths after which the engine is started again."""
        self.num_deaths = 0
        self._most = most
        self._clock = clock
        self.note_begin()
        self._old_from = self._begun

    @property
    def are_over(self) -> bool:
        """True if the engine is not to be started again."""
        return self.num_deaths > self._most

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        if not self.is_puzzling:
            return 0.0
        return float(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self.num_deaths - _RESTARTS_AT_ONCE - 1)))

    @property
    def is_puzzling(self) -> bool:
        """True if there have been so many deaths that what engines leave to the next may be their cause."""
        return self.num_deaths > _RESTARTS_AT_ONCE

    def note_begin(self) -> None:
        """Note that a process begins."""
        self._begun = self._clock()

    def note_ready(self) -> None:
        """Note that a process is ready, and from when on it has lived long enough not to have died "again"."""
        now = self._clock()
        self._old_from = now + max(_HEALTHY_SECONDS, _HEALTHY_STARTS * (now - self._begun))

    def note_death(self, *, is_explained: bool) -> None:
        """Count the death of a process that was ready."""
        before = 0 if self._clock() > self._old_from else self.num_deaths
        self.num_deaths = before + (not is_explained or self._most == 0)

    def note_failure(self) -> None:
        """Count a start that has failed."""
        self.num_deaths += 1

    def forgive(self, count: int) -> None:
        """Count so many of the deaths no more."""
        self.num_deaths = max(0, self.num_deaths - count)

    def reset(self) -> None:
        """Count none any more."""
        self.num_deaths = 0
