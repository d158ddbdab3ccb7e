"""Fit of a `StepTime` to measured steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.messages import SequenceTrace, StepTrace
from quire.protocol.simulation import StepTime, StepWork

NUM_TERMS = len(StepTime.__struct_fields__)
_ROUNDS = 8
_FAR = 8.0  # measured / fitted of steps that something else delayed
_LEAST_SECONDS = 1e-6

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured steps: `work` is [steps][terms of a `StepTime`], `seconds` [steps], `plays` the play of each step."""

    work: Array
    seconds: Array
    plays: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plays: list[list[StepTrace]]) -> Self:
        """Return the steps of the traces of each play of a scene, in order."""
        steps = [
            (number, *pair)
            for number, play in enumerate(plays)
            for pair in pairwise(trace for trace in play if trace.stats is not None)
        ]
        work = np.array([_terms(_work(step.sequences)) for _, step, _ in steps]).reshape(len(steps), NUM_TERMS)
        seconds = np.array([_seconds(step, after) for _, step, after in steps])
        return cls(work, seconds, np.array([number for number, _, _ in steps], np.int64))

    def select(self, chosen: npt.NDArray[np.bool_]) -> StepTimes:
        """Return the chosen ones of the steps."""
        return StepTimes(self.work[chosen], self.seconds[chosen], self.plays[chosen])

    def fitted(self, time: StepTime) -> Array:
        """Return the seconds of each step as `time` has them."""
        seconds: Array = self.work @ np.array(msgspec.structs.astuple(time))
        return np.maximum(seconds, _LEAST_SECONDS)


def fit(steps: StepTimes) -> tuple[StepTime, float]:
    """Return the times that fit best, and the median of |fitted - measured| / measured.

    The fit minimises the squares of errors relative to the fitted times, so that short steps count as much as long ones
    and the means come out right; errors relative to the measured times would make the fit too short. No time is
    negative. Steps that were delayed for long count only in the total time. Raises ValueError if there are fewer steps
    than times.
    """
    if len(steps.seconds) < NUM_TERMS:
        raise ValueError(f"{len(steps.seconds)} steps are too few for a fit; let the calibration run longer")
    fitted = steps.seconds
    for _ in range(_ROUNDS):
        near = steps.seconds < _FAR * fitted
        times = _least_squares(steps.work[near], steps.seconds[near], 1 / fitted[near])
        fitted = np.maximum(steps.work @ times, _LEAST_SECONDS)
    error = float(np.median(np.abs(fitted / steps.seconds - 1)))
    times *= steps.seconds.sum() / fitted.sum()
    return StepTime(*times.tolist()), error


def _least_squares(work: Array, seconds: Array, weights: Array) -> Array:
    """Return times of at least 0 for which `work` @ times is nearest to `seconds`, dropping negative terms."""
    columns = np.arange(work.shape[1])
    while True:
        found, *_ = np.linalg.lstsq(work[:, columns] * weights[:, np.newaxis], seconds * weights, rcond=None)
        if (found >= 0).all():
            times = np.zeros(work.shape[1])
            times[columns] = found
            return times
        columns = columns[found > found.min()]


def _work(sequences: list[SequenceTrace]) -> StepWork:
    return StepWork.of([each.start for each in sequences], [each.count for each in sequences])


def _terms(work: StepWork) -> tuple[float, ...]:
    return (1.0, *work, work.prefill_tokens**2)


def _seconds(step: StepTrace, after: StepTrace) -> float:
    """Return the time from the begin of a step to that of the next, or to its own end if the engine was idle then."""
    numbers = {sequence.number for sequence in step.sequences}
    if any(sequence.number in numbers for sequence in after.sequences):
        return after.begin - step.begin
    assert step.stats is not None
    return step.stats.schedule_seconds + step.stats.execute_seconds + step.stats.update_seconds
