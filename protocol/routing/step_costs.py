"""Seconds that an engine's steps take for each token, learned from the steps that it reports."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.protocol.messages import SchedulerStats

_MEMORY = 0.998  # weight of a step, of that of the next one
_RIDGE = 1e-3  # weight of the seconds with which a model begins, against those of one token
_STEPS = 16  # between two solutions


class StepSeconds(NamedTuple):
    """Seconds of a step: `base`, and more for each prefill token and for each decoding sequence."""

    base: float = 2e-3
    prefill: float = 1e-3
    decode: float = 1e-3


class StepCosts:
    """The `StepSeconds` of an engine, by least squares over its latest steps, some hundreds of them."""

    def __init__(self, *known: StepSeconds) -> None:
        """Begin with the mean of those that are known of other engines."""
        first = StepSeconds(*np.mean(known, axis=0).tolist()) if known else StepSeconds()
        self._first = np.array(first)
        self._products = np.zeros((3, 3))  # of the steps' work with itself
        self._seconds = np.zeros(3)  # its products with their seconds
        self._num_new = 0
        self.seconds = first

    def observe(self, stats: SchedulerStats) -> None:
        """Learn from the step that these are of."""
        if not stats.prefill_tokens and not stats.decode_tokens:
            return
        work = np.array((1.0, stats.prefill_tokens, stats.decode_tokens))
        self._products = _MEMORY * self._products + np.outer(work, work)
        self._seconds *= _MEMORY
        self._seconds += work * (stats.schedule_seconds + stats.execute_seconds + stats.update_seconds)
        self._num_new += 1
        if self._num_new % _STEPS == 1:
            self._solve()

    def _solve(self) -> None:
        """Solve the normal equations; terms that would be negative are none, and the others are solved without them."""
        products, seconds = self._products + _RIDGE * np.eye(3), self._seconds + _RIDGE * self._first
        terms = [0, 1, 2]
        found = np.zeros(3)
        while terms:
            found[:] = 0
            found[terms] = np.linalg.solve(products[np.ix_(terms, terms)], seconds[terms])
            if (found >= 0).all():
                break
            terms.remove(int(found.argmin()))
        self.seconds = StepSeconds(*found.tolist())
