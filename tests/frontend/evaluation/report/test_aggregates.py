"""Downsampling is even, in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.evaluation.report.aggregates import Downsampled


@given(st.integers(1, 20), st.permutations(range(90)))
def test_downsampling_is_even_bounded_and_independent_of_the_order(limit: int, order: list[int]) -> None:
    downsampled: Downsampled[str] = Downsampled(limit)
    for index in order:
        downsampled.add(index, f"item {index}")
        assert len(downsampled.items()) <= limit
    assert downsampled.items() == [(index, f"item {index}") for index in range(0, 90, downsampled.every)]
    assert downsampled.every == 1 or len(range(0, 90, downsampled.every // 2)) > limit
