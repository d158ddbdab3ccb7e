"""Distributions of seconds: exact for one value a request, pooled in buckets for hundreds of values a request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RELATIVE_ERROR = 0.0025
"""Largest relative error of a pooled quantile: half the width of a bucket."""

_GROWTH = math.log1p(2 * RELATIVE_ERROR)  # of a bucket's bounds, as a logarithm
_LEAST = 1e-9  # s; less is as good as nothing
_MOST = 1e7  # s
_BUCKETS = (
    math.ceil(math.log(_MOST / _LEAST) / _GROWTH) + 2
)  # the first is for smaller values, the last for larger ones
_BATCH = 1 << 16  # values that are sorted into buckets at once


class ValueDistribution(Protocol):
    """A distribution as figures and tables use it. All members except `count` need at least one value."""

    @property
    def count(self) -> int:
        """Number of values."""

    @property
    def mean(self) -> float:
        """Arithmetic mean."""

    @property
    def std(self) -> float:
        """Standard deviation of these values (not an estimate for a larger population)."""

    def quantiles(self, shares: Floats) -> Floats:
        """Return the quantiles at these shares (0 to 1), linearly interpolated between ranks."""


class ExactDistribution:
    """All values, 8 bytes each."""

    def __init__(self) -> None:
        self.values = array("d")

    def add(self, value: float) -> None:
        """Add a value."""
        self.values.append(value)

    @property
    def count(self) -> int:
        """Number of values."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return float(np.mean(self.values))

    @property
    def std(self) -> float:
        """Standard deviation of these values."""
        return float(np.std(self.values))

    def quantiles(self, shares: Floats) -> Floats:
        """Return numpy's quantiles."""
        found: Floats = np.quantile(self.values, shares)
        return found


class PooledDistribution:
    """Counts of values in buckets that grow by half a percent: 57 kB for any number of values.

    Quantiles are within `RELATIVE_ERROR` of the true ones; `count`, `total`, `mean`, `std` and the extremes are exact.
    Values are seconds, from 0 to 10^7.
    """

    def __init__(self) -> None:
        self._buckets = np.zeros(_BUCKETS, np.int64)
        self._batch = array("d")
        self._count = 0
        self._total = 0.0
        self._squares = 0.0  # of the distances from the mean
        self._least = math.inf
        self._most = -math.inf

    def extend(self, values: array[float]) -> None:
        """Add many values."""
        self._batch.extend(values)
        if len(self._batch) >= _BATCH:
            self._pool()

    @property
    def count(self) -> int:
        """Number of values."""
        self._pool()
        return self._count

    @property
    def total(self) -> float:
        """Sum of the values."""
        self._pool()
        return self._total

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return self.total / self.count

    @property
    def std(self) -> float:
        """Standard deviation of these values."""
        count = self.count  # which pools the squares too
        return math.sqrt(self._squares / count)

    def quantiles(self, shares: Floats) -> Floats:
        """Return quantiles interpolated between ranks as numpy does, each rank's value taken from its bucket."""
        return _between_ranks(self.at, shares * (self.count - 1))

    def at(self, ranks: Floats) -> Floats:
        """Return the values of these ranks, which are whole numbers from 0 for the least; pooled before by `count`."""
        buckets = np.searchsorted(np.cumsum(self._buckets), ranks, side="right")
        middles = _LEAST * np.exp((buckets - 0.5) * _GROWTH)
        values = np.clip(np.where(buckets == 0, 0.0, middles), self._least, self._most)
        return np.where(ranks <= 0, self._least, np.where(ranks >= self._count - 1, self._most, values))

    def _pool(self) -> None:
        if not self._batch:
            return
        values = np.array(self._batch)
        self._batch = array("d")
        self._merge_moments(values)
        logarithms = np.log(np.maximum(values, _LEAST / 2) / _LEAST)
        buckets = np.clip(np.floor(logarithms / _GROWTH).astype(np.int64) + 1, 0, _BUCKETS - 1)
        self._buckets += np.bincount(buckets, minlength=_BUCKETS)
        self._least = min(self._least, float(values.min()))
        self._most = max(self._most, float(values.max()))

    def _merge_moments(self, values: Floats) -> None:
        """Merge moments by Chan, Golub and LeVeque's pairwise update: sums of plain squares would cancel."""
        count, total = len(values), float(values.sum())
        squares = float(np.square(values - total / count).sum())
        if self._count:
            apart = total / count - self._total / self._count
            squares += apart * apart * self._count * count / (self._count + count)
        self._count += count
        self._total += total
        self._squares += squares


class WithZeros:
    """The values of a pooled distribution, and a number of zeros."""

    def __init__(self, values: PooledDistribution) -> None:
        self._values = values
        self.zeros = 0

    @property
    def zeros_share(self) -> float | None:
        """Share of the zeros among all values; None of no values."""
        return self.zeros / self.count if self.count else None

    @property
    def count(self) -> int:
        """Number of values, zeros included."""
        return self._values.count + self.zeros

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return self._values.total / self.count

    @property
    def std(self) -> float:
        """Standard deviation of these values."""
        if not self._values.count:
            return 0.0
        share = self._values.count / self.count
        return math.sqrt(share * (self._values.std**2 + (1 - share) * self._values.mean**2))

    def quantiles(self, shares: Floats) -> Floats:
        """Return quantiles as those of the values, with the zeros at the lowest ranks."""
        return _between_ranks(self._at, shares * (self.count - 1))

    def _at(self, ranks: Floats) -> Floats:
        if not self._values.count:
            return np.zeros(len(ranks))
        return np.where(ranks < self.zeros, 0.0, self._values.at(np.maximum(ranks - self.zeros, 0)))


def _between_ranks(at: Callable[[Floats], Floats], ranks: Floats) -> Floats:
    below = at(np.floor(ranks))
    return below + (at(np.ceil(ranks)) - below) * (ranks - np.floor(ranks))
