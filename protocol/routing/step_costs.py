"""Seconds that an engine's steps take for each token, learned from the steps that it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.protocol.messages import SchedulerStats

Floats = NDArray[np.float64]

_MEMORY = 0.998  # weight of a step, of that of the next one
_RIDGE = 1e-3  # weight of what was known before, against that of one token
_SHARED_STEPS = 16.0  # weight of what is known of other engines, in steps of this one
_STEPS = 16  # between two solutions


class StepSeconds(NamedTuple):
    """Seconds of a step: `base`, and more for each prefill token and for each decoding sequence."""

    base: float = 2e-3
    prefill: float = 1e-3
    decode: float = 1e-3


@dataclass(slots=True)
class _Equations:
    """Normal equations of steps: the products of their work with itself and with their seconds, and their weight."""

    products: Floats = field(default_factory=lambda: np.zeros((3, 3)))
    times: Floats = field(default_factory=lambda: np.zeros(3))
    weight: float = 0.0

    def add(self, work: Floats, seconds: float) -> None:
        """Add a step; those before count less from now on."""
        self.products = _MEMORY * self.products + work[:, None] * work
        self.times = _MEMORY * self.times + seconds * work
        self.weight = _MEMORY * self.weight + 1


class StepCosts:
    """The `StepSeconds` of an engine, by least squares over its latest steps, some hundreds of them.

    `shared` is of the steps of all engines. What an engine's own steps do not show is taken from there.
    """

    def __init__(self, shared: StepCosts | None = None) -> None:
        self._shared = shared
        self._equations = _Equations()
        self._num_steps = 0
        self._seconds = StepSeconds()

    @property
    def seconds(self) -> StepSeconds:
        """The times as they are known now."""
        return self._seconds if self._num_steps or self._shared is None else self._shared.seconds

    def observe(self, stats: SchedulerStats) -> None:
        """Learn from the step that these are of."""
        if not stats.prefill_tokens and not stats.decode_tokens:
            return
        work = np.array((1.0, stats.prefill_tokens, stats.decode_tokens))
        self._equations.add(work, stats.schedule_seconds + stats.execute_seconds + stats.update_seconds)
        if self._num_steps % _STEPS == 0:
            self._seconds = self._solve()
        self._num_steps += 1

    def _solve(self) -> StepSeconds:
        """Solve the normal equations; terms that would be negative are none, and the others are solved without them."""
        own, shared = self._equations, _Equations() if self._shared is None else self._shared._equations  # noqa: SLF001
        share = _SHARED_STEPS / max(shared.weight, 1.0)
        products = own.products + share * shared.products + _RIDGE * np.eye(3)
        times = own.times + share * shared.times + _RIDGE * np.array(self.seconds)
        terms = [0, 1, 2]
        found = np.zeros(3)
        while terms:
            found[:] = 0
            found[terms] = np.linalg.solve(products[np.ix_(terms, terms)], times[terms])
            if (found >= 0).all():
                break
            terms.remove(int(found.argmin()))
        return StepSeconds(*found.tolist())
