"""Made-up arrivals have the rate and the burstiness that were asked for, and made-up requests the lengths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from quire.frontend.evaluation.workload.arrivals import arrive, at_rate, ramp
from quire.frontend.evaluation.workload.blocks import blocks_for
from quire.frontend.evaluation.workload.made_up import random_requests
from quire.frontend.evaluation.workload.prompts import Prompts
from quire.frontend.evaluation.workload.sharing import infinite_cache_hits

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
        (lambda: random_requests(0, 1, 1), "num"),
        (lambda: random_requests(1, 0, 1), "input_len"),
        (lambda: random_requests(1, 1, 0), "output_len"),
        (lambda: random_requests(1, 1, 1, 1.0), "range_ratio"),
        (lambda: random_requests(1, 1, 1, prefix_len=-1), "prefix_len"),
    ],
)
def test_what_is_out_of_range_is_named_at_once(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        call()


def test_random_requests_have_lengths_in_the_range_and_share_the_prefix_alone() -> None:
    requests = list(arrive(random_requests(500, 100, 20, 0.5, 64, seed=1), at_rate(10)))
    assert len(requests) == 500
    assert {each.prompt_tokens - 64 for each in requests} == set(range(50, 151))
    assert {each.output_tokens for each in requests} == set(range(10, 31))
    assert all(len(each.blocks) == blocks_for(each.prompt_tokens, each.block_tokens) for each in requests)
    assert infinite_cache_hits(requests, 1) == 499 * 64
    first, second = (Prompts(1 << 14).tokens(each) for each in requests[:2])
    assert first[:64] == second[:64]
    assert requests[0].arrival < requests[1].arrival


def test_random_requests_without_a_prefix_share_nothing() -> None:
    requests = list(random_requests(20, 1000, 8))
    assert {(each.prompt_tokens, each.output_tokens) for each in requests} == {(1000, 8)}
    assert infinite_cache_hits(requests, 1) == 0
