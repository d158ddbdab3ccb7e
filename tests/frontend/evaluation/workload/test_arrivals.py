"""Synthetic arrivals have the requested rate and burstiness."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from quire.frontend.evaluation.workload.arrivals import at_rate, ramp

COUNT = 20_000


def take(times: Iterator[float], count: int = COUNT) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(list(islice(times, count)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(burstiness: float) -> None:
    gaps = np.diff(take(at_rate(5, burstiness)), prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_seed_decides_the_times() -> None:
    assert (take(at_rate(5, seed=3)) == take(at_rate(5, seed=3))).all()
    assert (take(at_rate(5, seed=3)) != take(at_rate(5, seed=4))).all()


def test_infinite_burstiness_is_constant_and_an_infinite_rate_all_at_once() -> None:
    assert take(at_rate(4, float("inf")), 4).tolist() == [0.25, 0.5, 0.75, 1.0]
    assert take(at_rate(float("inf")), 3).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("strategy", "rates"), [("linear", [1, 3.25, 5.5, 7.75, 10, 10]), ("exponential", [1, 2, 4, 8, 16, 16])]
)
def test_a_ramp_goes_from_one_rate_to_the_other_and_stays_there(strategy: Any, rates: list[float]) -> None:
    times = take(ramp(rates[0], rates[-1], 5, strategy, float("inf")), 6)
    assert 1 / np.diff(times, prepend=0.0) == pytest.approx(np.array(rates))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: at_rate(0), "rate"),
        (lambda: at_rate(float("nan")), "rate"),
        (lambda: at_rate(1, 0), "burstiness"),
        (lambda: ramp(0, 1, 5), "start_rate"),
        (lambda: ramp(1, float("inf"), 5), "end_rate"),
        (lambda: ramp(1, 2, 0), "num_requests"),
        (lambda: ramp(1, 2, 5, "square"), "strategy"),  # type: ignore[arg-type]
    ],
)
def test_a_value_out_of_range_is_named_at_once(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        call()
