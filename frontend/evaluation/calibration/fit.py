"""Fits a `StepTime` to measured steps."""

from __future__ import annotations

import numpy as np

from quire.frontend.evaluation.calibration.steps import Array, StepTimes
from quire.protocol.simulation import StepTime

_ROUNDS = 8
_FAR = 8.0  # measured / fitted of steps that were held up by something else
_LEAST_SECONDS = 1e-6


def fit(steps: StepTimes) -> tuple[StepTime, float]:
    """The times that fit best, and the median of |fitted - measured| / measured.

    Least squares of the errors, each relative to what is fitted, so that short steps count as much as long ones and
    the means come out right; relative to what was measured, times would come out too short. No time is below zero.
    Steps that were held up for long count only in that all together take as long as they did. Raises ValueError if
    there are fewer steps than times.
    """
    if len(steps.seconds) < len(StepTime.__struct_fields__):
        raise ValueError(f"{len(steps.seconds)} steps are too few to tell what a step costs; let it run longer")
    fitted = steps.seconds
    for _ in range(_ROUNDS):
        near = steps.seconds < _FAR * fitted
        times = _least_squares(steps.work[near], steps.seconds[near], 1 / fitted[near])
        fitted = np.maximum(steps.work @ times, _LEAST_SECONDS)
    error = float(np.median(np.abs(fitted / steps.seconds - 1)))
    times *= steps.seconds.sum() / fitted.sum()
    return StepTime(*times.tolist()), error


def _least_squares(work: Array, seconds: Array, weights: Array) -> Array:
    """Times of at least 0 for which `work` @ times is nearest to `seconds`: what would be negative is left out."""
    columns = np.arange(work.shape[1])
    while True:
        found, *_ = np.linalg.lstsq(work[:, columns] * weights[:, np.newaxis], seconds * weights, rcond=None)
        if (found >= 0).all():
            times = np.zeros(work.shape[1])
            times[columns] = found
            return times
        columns = columns[found > found.min()]
