"""The fit recovers the known costs of steps, and scenes fit the engine."""

from __future__ import annotations

import numpy as np
import pytest

from quire.frontend.evaluation.calibration.fit import StepTimes, fit
from quire.frontend.evaluation.calibration.scenes import families
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import SchedulerStats, SequenceTrace, StepTrace
from quire.protocol.simulation import StepTime, StepWork

TRUE = StepTime(1e-3, 2e-5, 3e-4, 1e-7, 1e-8, 2e-9)


def traces(seed: int, count: int, *, idle_after: int | None = None, pauses: bool = False) -> list[StepTrace]:
    """Return steps with random decodes and prefills, which take the time of `TRUE`."""
    random = np.random.default_rng(seed)
    found, now = [], 100.0
    for number in range(count):
        spans = [(int(start), 1) for start in random.integers(1, 2000, random.integers(1, 64))]
        spans += [
            (int(start), int(random.integers(2, 500))) for start in random.integers(0, 1000, random.integers(0, 3))
        ]
        seconds = TRUE.seconds(StepWork.of([start for start, _ in spans], [count for _, count in spans]))
        sequences = [SequenceTrace(index, str(index), *span) for index, span in enumerate(spans)]
        stats = SchedulerStats(execute_seconds=seconds)
        found.append(StepTrace(now, stats, sequences))
        now += seconds * (20 if pauses and random.random() < 0.02 else 1)
        if number == idle_after:
            now += 60
            found.append(StepTrace(now, stats, [SequenceTrace(999, "another", 0, 7)]))
            now += seconds
    return found


def test_exact_steps_give_their_times() -> None:
    found, error = fit(StepTimes.of([traces(1, 300)]))
    assert found.base == pytest.approx(TRUE.base, rel=1e-3)
    for name in StepTime.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-2)
    assert error < 1e-6


def test_idle_time_does_not_count() -> None:
    plays = [traces(2, 200, idle_after=100)]
    steps = StepTimes.of(plays)
    assert steps.seconds.max() < 1
    assert len(steps.seconds) == 200


def test_delayed_steps_only_raise_the_sum() -> None:
    steps = StepTimes.of([traces(3, 500, pauses=True)])
    found, _ = fit(steps)
    fitted = steps.work @ np.array([getattr(found, name) for name in StepTime.__struct_fields__])
    assert fitted.sum() == pytest.approx(steps.seconds.sum())
    ratios = np.array([getattr(found, name) / getattr(TRUE, name) for name in StepTime.__struct_fields__])
    assert ratios == pytest.approx(ratios[0], rel=1e-2)  # all equal: the share that the pauses add


def test_useless_terms_are_zero_and_not_negative() -> None:
    steps = StepTimes.of([traces(4, 300)])
    steps.seconds[:] = 1e-3 + 1e-4 * steps.work[:, 2]  # decodes alone
    steps.seconds[:] *= np.random.default_rng(0).uniform(0.99, 1.01, len(steps.seconds))
    found, _ = fit(steps)
    assert min(getattr(found, name) for name in StepTime.__struct_fields__) >= 0
    assert found.decode == pytest.approx(1e-4, rel=0.05)


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 steps are too few"):
        fit(StepTimes.of([traces(5, 4)]))


@pytest.mark.parametrize(("context", "seqs", "pages"), [(64, 1, 4), (2048, 256, 16384), (131072, 8, 5000)])
def test_scenes_fit_the_engine(context: int, seqs: int, pages: int) -> None:
    shape = EngineShape(1000, context, seqs, 2048, 32, pages)
    scenes = [scene for family in families(shape) for scene in family]
    assert scenes
    for scene in scenes:
        assert 1 <= scene.concurrency <= seqs
        assert len(scene.requests) >= scene.concurrency
        for request in scene.requests:
            assert request.prompt_tokens >= 1
            assert request.output_tokens >= 1
            assert request.prompt_tokens + request.output_tokens <= min(context, pages * 32)
