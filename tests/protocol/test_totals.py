"""Buckets against a count of the values themselves."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from quire.protocol.totals import Distribution

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, unique=True).map(sorted), st.lists(numbers))
def test_each_value_falls_into_the_bucket_whose_bound_it_does_not_exceed(
    bounds: list[float], values: list[float]
) -> None:
    values = values + bounds  # a value that equals a bound is below it
    distribution = Distribution.of(bounds)
    for value in values[::2]:
        distribution.observe(value)
    distribution.observe_all(values[1::2])
    for index, bound in enumerate(bounds):
        assert sum(distribution.counts[: index + 1]) == sum(value <= bound for value in values)
    assert sum(distribution.counts) == len(values)
    assert math.isclose(distribution.sum, math.fsum(values), abs_tol=1e-3)
