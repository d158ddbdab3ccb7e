"""What speaks against a fit, on steps of known times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.frontend.evaluation.calibration.fit import StepTimes, fit
from quire.frontend.evaluation.calibration.trust import Evidence
from quire.protocol.simulation import StepTime

TRUE = StepTime(1e-3, 2e-5, 3e-4, 1e-7, 1e-8, 2e-9)
PLAYS = 8


def steps(spread: float = 0.0, count: int = 50, *, repeat: bool = True) -> StepTimes:
    """Return steps of `TRUE`, in plays of scenes that repeat, each step longer by up to `spread`."""
    random = np.random.default_rng(7)
    plays = np.repeat(np.arange(PLAYS), count)
    scenes = [_work(np.random.default_rng(play % (PLAYS // 2) if repeat else play), count) for play in range(PLAYS)]
    found = StepTimes(np.concatenate(scenes), np.zeros(PLAYS * count), plays)
    found.seconds[:] = found.fitted(TRUE) * random.uniform(1, 1 + spread, PLAYS * count)
    return found


def _work(random: np.random.Generator, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    decodes = random.integers(1, 64, count)
    prompts = random.integers(2, 500, count) * (random.random(count) < 0.5)
    kv = decodes * random.integers(1, 2000, count)
    return np.stack([np.ones(count), prompts, decodes, kv, prompts**2, prompts**2], 1).astype(np.float64)


def doubts(measured: StepTimes, time: StepTime | None = None, steal: float | None = 0.0) -> list[str]:
    return Evidence.of(measured, time or fit(measured)[0], steal).doubts


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_steps_that_repeat_and_fit_are_trusted(spread: float) -> None:
    measured = steps(spread)
    evidence = Evidence.of(measured, fit(measured)[0], 0.01)
    assert evidence.doubts == []
    assert evidence.noise is not None
    assert evidence.noise == pytest.approx(spread / 3, abs=0.02)  # |a - b| of uniform a and b
    assert evidence.error is not None
    assert evidence.error < spread / 2 + 1e-6
    assert sum(evidence.steps) == len(measured.seconds)


def test_too_few_steps_say_how_many_are_needed() -> None:
    few = doubts(steps(count=6))
    assert any(each.endswith("steps were measured, and at least 30 are needed; raise --seconds") for each in few)


def test_a_step_that_never_repeats_leaves_the_noise_unknown() -> None:
    assert any(each.startswith("no step was measured twice") for each in doubts(steps(repeat=False)))


def test_the_same_step_with_different_times_is_noise() -> None:
    found = doubts(steps(2.0))
    assert any("measured twice, took" in each and "at most 25% is allowed; end other work" in each for each in found)


def test_steps_that_the_fit_does_not_explain_are_an_error() -> None:
    measured = steps()
    measured.seconds[:] *= np.where(np.arange(len(measured.seconds)) % 2, 3, 1)
    assert any("off in the median of steps that it has not seen" in each for each in doubts(measured))


def test_a_sum_that_is_far_off_is_not_trusted() -> None:
    evidence = Evidence(TRUE, (100, 100), noise=0.01, error=0.05, bias=(0.4, -0.3), steal=None)
    assert evidence.doubts == [
        f"the fit makes {which} in their sum, and at most 25% is allowed; raise --seconds"
        for which in (
            "prompt steps that it has not seen 40% too long",
            "decode steps that it has not seen 30% too short",
        )
    ]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (lambda work: 0.1 - 1e-3 * work[:, 2], "a decoding sequence takes no time in the best fit"),
        (lambda work: 1e-3 + 1e-4 * work[:, 2], "a token of a prompt takes no time in the best fit"),
        (lambda work: 1e-4 * work[:, 2] + 1e-5 * work[:, 1], "a step takes no time in the best fit"),
    ],
)
def test_work_that_costs_nothing_is_not_trusted(
    seconds: Callable[
        [np.ndarray[tuple[int, int], np.dtype[np.float64]]], np.ndarray[tuple[int], np.dtype[np.float64]]
    ],
    told: str,
) -> None:
    measured = steps()
    measured.seconds[:] = seconds(measured.work)
    time = fit(measured)[0]
    if told.startswith("a token"):  # noise alone would leave a little
        time = StepTime(time.base, 0.0, time.decode)
    if told.startswith("a step"):
        time = StepTime(0.0, 1e-5, 1e-4)
    assert any(each.startswith(told) for each in doubts(measured, time))


def test_a_time_that_is_not_a_number_is_not_trusted() -> None:
    assert "a time of the fit is not a number; calibrate again" in doubts(steps(), StepTime(float("nan"), 1e-5, 1e-4))


def test_steal_time_is_not_trusted() -> None:
    [doubt] = doubts(steps(), steal=0.12)
    assert doubt.startswith("other guests had 12.0% of this host's CPU time, and at most 5% is allowed")
    assert doubts(steps(), steal=None) == []


def test_steps_of_one_play_cannot_be_judged() -> None:
    measured = steps()
    alone = measured.select(measured.plays == 0)
    assert any(each.startswith("no play of a scene could be held out") for each in doubts(alone))
