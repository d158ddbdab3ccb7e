"""Reasons to distrust the fit of a calibration: too few steps, too much noise, errors on steps that were held out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.frontend.evaluation.calibration.fit import Array, StepTimes, fit
from quire.protocol.simulation import StepTime

LEAST_STEPS = 30
"""Steps with prompt tokens, and as many with decodes only, that a fit needs."""

MOST_NOISE = 0.25
"""Limit on the median difference of steps with the same work, relative to the shorter one."""

MOST_ERROR = 0.25
"""Limit on the median error on held-out steps, relative to the measured time."""

MOST_BIAS = 0.25
"""Limit on the error of the sum of held-out steps: what a simulated server would be too fast or too slow by."""

MOST_STEAL = 0.05
"""Limit on the share of the host's CPU time that other guests of its hypervisor had."""

_FOLDS = 4
_KINDS = ("prompt", "decode")
_FAR = 8.0  # measured / fitted of steps that something else delayed, as for the fit


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements of a fit. `error` and `bias` are of held-out plays of scenes, None where nothing could be held out.

    `steps` and `bias` are of steps with prompt tokens, and of those with decodes only. `noise` is the median difference
    of two steps with the same work in different plays, relative to the shorter; None where no work was repeated.
    """

    time: StepTime
    steps: tuple[int, int]
    noise: float | None
    error: float | None
    bias: tuple[float | None, float | None]
    steal: float | None

    @classmethod
    def of(cls, steps: StepTimes, time: StepTime, steal: float | None) -> Evidence:
        """Collect the evidence for `time`, which was fitted to the steps."""
        with_prompts = steps.work[:, 1] > 0
        held_out = _held_out(steps)
        near = steps.seconds < _FAR * held_out  # False where nothing was held out
        error = float(np.median(np.abs(held_out / steps.seconds - 1)[near])) if near.any() else None
        prompts, decodes = (_bias(steps.seconds, held_out, near & kind) for kind in (with_prompts, ~with_prompts))
        counts = int(with_prompts.sum()), int((~with_prompts).sum())
        return cls(time, counts, _noise(steps), error, (prompts, decodes), steal)

    @property
    def doubts(self) -> list[str]:
        """Sentences that say what was measured, what is allowed and what to do; empty if the fit can be trusted."""
        return [*self._few_steps(), *self._disturbances(), *self._wrong_terms(), *self._errors()]

    def _few_steps(self) -> list[str]:
        return [
            f"{count} {kind} steps were measured, and at least {LEAST_STEPS} are needed; raise --seconds"
            for kind, count in zip(_KINDS, self.steps, strict=True)
            if count < LEAST_STEPS
        ]

    def _disturbances(self) -> list[str]:
        found = []
        if self.noise is None:
            found.append("no step was measured twice, so that the noise of this host is unknown; raise --seconds")
        elif not self.noise <= MOST_NOISE:
            found.append(
                f"the same step, measured twice, took {self.noise:.0%} longer in the median, and at most "
                f"{MOST_NOISE:.0%} is allowed; end other work on this host, and calibrate again"
            )
        if self.steal is not None and self.steal > MOST_STEAL:
            found.append(
                f"other guests had {self.steal:.1%} of this host's CPU time, and at most {MOST_STEAL:.0%} is allowed; "
                "calibrate again when it is quieter"
            )
        return found

    def _wrong_terms(self) -> list[str]:
        time = self.time
        if not all(math.isfinite(seconds) for seconds in msgspec.structs.astuple(time)):
            return ["a time of the fit is not a number; calibrate again"]
        nothing = {
            "a step": time.base,
            "a token of a prompt": time.prefill_token + time.prefill_squared + time.prefill_total_squared,
            "a decoding sequence": time.decode + time.kv_token,
        }
        return [
            f"{what} takes no time in the best fit: more of it did not take longer, as it must; end other work on this "
            "host, and raise --seconds"
            for what, seconds in nothing.items()
            if seconds <= 0
        ]

    def _errors(self) -> list[str]:
        if self.error is None:
            return ["no play of a scene could be held out, so that the error of the fit is unknown; raise --seconds"]
        found = []
        if not self.error <= MOST_ERROR:
            found.append(
                f"the fit is {self.error:.0%} off in the median of steps that it has not seen, and at most "
                f"{MOST_ERROR:.0%} is allowed; end other work on this host, and raise --seconds"
            )
        found += [
            f"the fit makes {kind} steps that it has not seen {abs(bias):.0%} too {'long' if bias > 0 else 'short'} in "
            f"their sum, and at most {MOST_BIAS:.0%} is allowed; raise --seconds"
            for kind, bias in zip(_KINDS, self.bias, strict=True)
            if bias is not None and not abs(bias) <= MOST_BIAS
        ]
        return found


def _held_out(steps: StepTimes) -> Array:
    """Return the time of each step by a fit to the plays outside its fold; 0 where there are too few."""
    found = np.zeros(len(steps.seconds))
    folds = steps.plays % _FOLDS
    for fold in range(_FOLDS):
        out = folds == fold
        try:
            time, _ = fit(steps.select(~out))
        except ValueError:  # too few steps are left
            continue
        found[out] = steps.select(out).fitted(time)
    return found


def _bias(seconds: Array, held_out: Array, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float | None:
    return float(held_out[chosen].sum() / seconds[chosen].sum() - 1) if chosen.any() else None


def _noise(steps: StepTimes) -> float | None:
    """Compare each step with the next one of the same work, if that is in another play."""
    order = np.lexsort((steps.plays, *steps.work.T))
    work, plays, seconds = steps.work[order], steps.plays[order], steps.seconds[order]
    pairs = (work[1:] == work[:-1]).all(axis=1) & (plays[1:] != plays[:-1])
    if not pairs.any():
        return None
    first, second = seconds[:-1][pairs], seconds[1:][pairs]
    return float(np.median(np.maximum(first, second) / np.minimum(first, second) - 1))
