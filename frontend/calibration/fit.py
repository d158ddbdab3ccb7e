"""Fits a `StepTime` to measured steps."""

from __future__ import annotations

import numpy as np

from quire.frontend.calibration.steps import Array, StepTimes
from quire.protocol.simulation import StepTime

_ROUNDS = 8
_NEAR = (0.4, 2.0)  # measured / fitted of the steps that count: others were held up by something else


def fit(steps: StepTimes) -> tuple[StepTime, float]:
    """The times that fit best, and the median of |fitted - measured| / measured.

    Least squares of the relative error, so that short steps count as much as long ones; no time is below zero. Steps
    that were held up count only in that all together take as long as they did. Raises ValueError if there are fewer
    steps than times.
    """
    if len(steps.seconds) < len(StepTime.__struct_fields__):
        raise ValueError(f"{len(steps.seconds)} steps are too few to tell what a step costs; let it run longer")
    relative = steps.work / steps.seconds[:, np.newaxis]
    near = np.ones(len(relative), dtype=bool)
    times = np.zeros(relative.shape[1])
    for _ in range(_ROUNDS):
        times = _least_squares(relative[near])
        ratio = 1 / np.maximum(relative @ times, 1e-9)
        near = (ratio > _NEAR[0]) & (ratio < _NEAR[1])
    error = float(np.median(np.abs(relative @ times - 1)))
    times *= steps.seconds.sum() / (steps.work @ times).sum()
    return StepTime(*times.tolist()), error


def _least_squares(relative: Array) -> Array:
    """Times of at least 0 for which `relative` @ times is nearest to 1: terms that would be negative are left out."""
    columns = np.arange(relative.shape[1])
    while True:
        found, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(relative)), rcond=None)
        if (found >= 0).all():
            times = np.zeros(relative.shape[1])
            times[columns] = found
            return times
        columns = columns[found > found.min()]
