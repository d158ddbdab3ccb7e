"""Distributions against numpy."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.evaluation.report.quantiles import RELATIVE_ERROR, ExactDistribution, PooledDistribution, WithZeros

SECONDS = st.one_of(st.just(0.0), st.floats(1e-6, 1e5))
SHARES = np.array([0.0, 0.01, 0.1, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0])


@given(st.lists(SECONDS, min_size=1, max_size=300), st.integers(1, 50))
def test_pooled_quantiles_are_within_their_relative_error(values: list[float], size: int) -> None:
    pooled = PooledDistribution()
    for begin in range(0, len(values), size):
        pooled.extend(array("d", values[begin : begin + size]))
    true = np.quantile(values, SHARES)
    assert np.all(np.abs(pooled.quantiles(SHARES) - true) <= RELATIVE_ERROR * true + 1e-12)
    assert pooled.quantiles(np.array([0.0, 1.0])).tolist() == [min(values), max(values)]


@given(st.lists(st.lists(SECONDS, max_size=40), min_size=1, max_size=8).filter(any))
def test_pooled_moments_are_those_of_all_values(batches: list[list[float]]) -> None:
    pooled = PooledDistribution()
    for batch in batches:
        pooled.extend(array("d", batch))
        assert pooled.count >= 0  # which pools what there is: the next batch is merged with it
    values = np.concatenate([np.array(batch) for batch in batches])
    assert pooled.count == len(values)
    np.testing.assert_allclose(pooled.total, values.sum(), rtol=1e-9)
    np.testing.assert_allclose(pooled.mean, values.mean(), rtol=1e-9)
    np.testing.assert_allclose(pooled.std, values.std(), rtol=1e-7, atol=1e-9 * values.max())


@given(st.lists(SECONDS, max_size=60), st.integers(0, 60))
def test_zeros_count_as_values(values: list[float], zeros: int) -> None:
    pooled = PooledDistribution()
    pooled.extend(array("d", values))
    every = WithZeros(pooled)
    every.zeros = zeros
    both = np.array([0.0] * zeros + values)
    assert every.count == len(both)
    assert every.zeros_share == (zeros / len(both) if len(both) else None)
    if len(both):
        np.testing.assert_allclose(every.mean, both.mean(), rtol=1e-9)
        np.testing.assert_allclose(every.std, both.std(), rtol=1e-7, atol=1e-9 * both.max())
        true = np.quantile(both, SHARES)
        assert np.all(np.abs(every.quantiles(SHARES) - true) <= RELATIVE_ERROR * true + 1e-12)


def test_more_values_than_a_batch_are_pooled_alike() -> None:
    values = np.random.default_rng(0).lognormal(-3, 1, 200_000)
    pooled = PooledDistribution()
    for part in np.split(values, 100):
        pooled.extend(array("d", part.tobytes()))
    np.testing.assert_allclose(pooled.quantiles(SHARES), np.quantile(values, SHARES), rtol=RELATIVE_ERROR)
    np.testing.assert_allclose([pooled.mean, pooled.std], [values.mean(), values.std()], rtol=1e-9)


@settings(max_examples=30)
@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_exact_values_are_numpys(values: list[float]) -> None:
    exact = ExactDistribution()
    for value in values:
        exact.add(value)
    assert exact.quantiles(SHARES).tolist() == np.quantile(values, SHARES).tolist()
    assert exact.count == len(values)
    assert [exact.mean, exact.std] == [float(np.mean(values)), float(np.std(values))]
