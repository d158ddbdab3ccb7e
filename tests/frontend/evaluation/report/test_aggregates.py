"""Thinning keeps even shares, whatever the order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.evaluation.report.aggregates import Downsampled


@given(st.integers(1, 20), st.permutations(range(90)))
def test_what_is_kept_is_even_bounded_and_does_not_depend_on_the_order(limit: int, order: list[int]) -> None:
    thinned: Downsampled[str] = Downsampled(limit)
    for index in order:
        thinned.add(index, f"item {index}")
        assert len(thinned.items()) <= limit
    assert thinned.items() == [(index, f"item {index}") for index in range(0, 90, thinned.every)]
    assert thinned.every == 1 or len(range(0, 90, thinned.every // 2)) > limit
