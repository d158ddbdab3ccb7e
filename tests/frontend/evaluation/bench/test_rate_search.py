"""Rates that a search tries, against synthetic targets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.evaluation.bench.rate_search import RateSearch

Shares = Callable[[float], float | None]


def rates_of(search: RateSearch, share: Shares) -> list[float]:
    """Return the rates that the search tries until its end, fewer than 100."""
    tried: list[float] = []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        assert len(tried) < 100
        search.record(share(rate))
    return tried


@given(
    capacity=st.floats(1.0, 1000.0),
    low=st.floats(0.01, 1.0),
    precision=st.floats(0.001, 1.0),
    short=st.sampled_from([0.0, 0.5, 0.985]),
)
def test_the_highest_rate_is_found_in_few_runs(capacity: float, low: float, precision: float, short: float) -> None:
    search = RateSearch(low, low * 2**20, precision=precision)
    tried = rates_of(search, lambda rate: 1.0 if rate <= capacity else short)
    assert search.met is not None
    assert search.missed is not None
    assert search.met <= capacity < search.missed <= search.met * (1 + precision)
    doublings = math.ceil(math.log2(capacity / low)) + 1
    assert len({*tried}) <= doublings + 1 + math.ceil(math.log2(1 / precision))
    assert all(tried.count(rate) <= 2 for rate in tried)
    if short < 0.9:  # only the lowest that missed
        assert len(tried) - len({*tried}) == 1


@given(capacity=st.floats(1.0, 100.0), at=st.integers(0, 8), share=st.floats(0.94, 0.9899))
def test_a_rate_that_misses_once_by_little_has_a_second_try(capacity: float, at: int, share: float) -> None:
    search, calm = RateSearch(0.5), RateSearch(0.5)
    told = 0

    def noisy(rate: float) -> float:
        nonlocal told
        told += 1
        return share if told == at + 1 or rate > capacity else 1.0

    rates_of(calm, lambda rate: 1.0 if rate <= capacity else share)
    rates_of(search, noisy)
    assert (search.met, search.missed) == (calm.met, calm.missed)


@given(capacity=st.floats(1.0, 100.0), at=st.integers(0, 30), precision=st.floats(0.01, 1.0))
def test_a_rate_that_misses_once_by_chance_does_not_end_the_search_there(
    capacity: float, at: int, precision: float
) -> None:
    search = RateSearch(0.5, 1e6, precision=precision)
    told = 0

    def noisy(rate: float) -> float | None:
        nonlocal told
        told += 1
        return None if told == at + 1 else float(rate <= capacity)

    rates_of(search, noisy)
    assert search.met is not None
    assert search.missed is not None
    assert search.met <= capacity < search.missed <= search.met * (1 + precision)


def test_of_rates_that_miss_by_much_or_are_not_valid_only_the_lowest_has_a_second_try() -> None:
    search = RateSearch(4.0, precision=0.5)
    shares: dict[float, float | None] = {4.0: 1.0, 8.0: None, 6.0: 0.9}
    assert rates_of(search, shares.__getitem__) == [4.0, 8.0, 6.0, 6.0]
    assert (search.met, search.missed) == (4.0, 6.0)


def test_a_search_ends_with_the_lowest_rate_that_misses() -> None:
    search = RateSearch(3.0)
    assert rates_of(search, lambda rate: 0.0) == [3.0, 3.0]
    assert (search.met, search.missed) == (None, 3.0)


@pytest.mark.parametrize(("high", "last"), [(5.0, 5.0), (1.0, 1.0), (None, 1024.0)])
def test_a_search_ends_with_the_highest_rate_that_meets(high: float | None, last: float) -> None:
    search = RateSearch(1.0, high)
    assert rates_of(search, lambda rate: 1.0)[-1] == last
    assert (search.met, search.missed) == (last, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"low": 0.0}, "--low 0 is out of range"),
        ({"low": math.nan}, "--low nan"),
        ({"low": math.inf}, "--low inf"),
        ({"low": 2.0, "high": 1.0}, "--high 1 is out of range; it must be at least --low, 2"),
        ({"low": 2.0, "attainment": 0.0}, "--attainment 0"),
        ({"low": 2.0, "attainment": 99.0}, "at most 1"),
        ({"low": 2.0, "precision": 0.0}, "--precision 0"),
    ],
)
def test_invalid_parameters_of_a_search_are_rejected(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RateSearch(**values)
