"""Ticks are round, few, and within the range of the values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.evaluation.report.markup import Scale, linear_ticks, log_ticks, logit, time_ticks


@given(st.floats(1e-3, 1e9), st.integers(2, 8), st.booleans())
def test_linear_ticks_reach_from_zero_to_the_highest_value(high: float, count: int, whole: bool) -> None:
    ticks = linear_ticks(high, count, whole=whole)
    assert ticks[0] == 0.0
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= count + 1
    if whole and high >= count:
        assert all(tick == int(tick) for tick in ticks)


@given(st.floats(1e-3, 1e6), st.floats(1.5, 1e4))
def test_log_ticks_lie_within_and_are_few(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert all(low <= tick <= low * factor for tick in ticks)
    assert 1 <= len(ticks) <= 5


@given(st.floats(0.5, 1e7))
def test_time_ticks_are_named_in_one_unit(seconds: float) -> None:
    ticks = time_ticks(seconds)
    assert 1 <= len(ticks) <= 7
    assert ticks[-1][0] <= seconds * (1 + 1e-6)
    assert len({words.split()[1] for _, words in ticks[1:]}) <= 1


def test_time_ticks_read_well() -> None:
    assert time_ticks(80.0) == [(0, "0"), (20, "20 s"), (40, "40 s"), (60, "60 s"), (80, "80 s")]
    assert [words for _, words in time_ticks(600.0)] == ["0", "2 min", "4 min", "6 min", "8 min", "10 min"]
    assert [words for _, words in time_ticks(40_000.0)] == ["0", "2 h", "4 h", "6 h", "8 h", "10 h"]


def test_a_scale_draws_values_outside_at_its_border() -> None:
    scale = Scale(0.0, 10.0, 100.0, 200.0)
    assert [scale(value) for value in (-1.0, 0.0, 5.0, 10.0, 99.0)] == [100.0, 100.0, 150.0, 200.0, 200.0]
    shares = Scale(0.1, 0.9, 0.0, 100.0, logit)
    assert shares(0.5) == 50.0
