"""Distributions of seconds: exact for what each request has once, pooled in buckets for what it has hundreds of."""

from __future__ import annotations

import math
from array import array
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RELATIVE_ERROR = 0.0025
"""How far a pooled quantile may be from the true one, as a share of it: half the width of a bucket."""

_GROWTH = math.log1p(2 * RELATIVE_ERROR)  # of a bucket's bounds, as a logarithm
_LEAST = 1e-9  # s; less is as good as nothing
_MOST = 1e7  # s
_BUCKETS = math.ceil(math.log(_MOST / _LEAST) / _GROWTH) + 2  # the first is for less, the last for more
_BATCH = 1 << 16  # values that are put into their buckets at once


class Distribution(Protocol):
    """What a figure or a table asks of a distribution. All but `count` need at least one value."""

    @property
    def count(self) -> int:
        """How many values there are."""

    @property
    def mean(self) -> float:
        """The arithmetic mean."""

    @property
    def std(self) -> float:
        """The standard deviation of the values as they are (not of a population they are drawn from)."""

    def quantiles(self, shares: Floats) -> Floats:
        """The values below which such shares (0 to 1) of all values are, between ranks interpolated linearly."""


class Exact:
    """Keeps every value: 8 bytes each."""

    def __init__(self) -> None:
        self.values = array("d")

    def add(self, value: float) -> None:
        """Take one value."""
        self.values.append(value)

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return float(np.mean(self.values))

    @property
    def std(self) -> float:
        """The standard deviation of the values as they are."""
        return float(np.std(self.values))

    def quantiles(self, shares: Floats) -> Floats:
        """As numpy has them."""
        found: Floats = np.quantile(self.values, shares)
        return found


class Pooled:
    """Keeps counts in buckets that grow by half a percent: 57 kB for any number of values.

    Quantiles are within `RELATIVE_ERROR` of the true ones; `count`, `total`, `mean`, `std` and the extremes are exact.
    Values are seconds, of 0 to 10^7.
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
        """Take many values."""
        self._batch.extend(values)
        if len(self._batch) >= _BATCH:
            self._pool()

    @property
    def count(self) -> int:
        """How many values there are."""
        self._pool()
        return self._count

    @property
    def total(self) -> float:
        """The sum."""
        self._pool()
        return self._total

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return self.total / self.count

    @property
    def std(self) -> float:
        """The standard deviation of the values as they are."""
        count = self.count  # which pools the squares too
        return math.sqrt(self._squares / count)

    def quantiles(self, shares: Floats) -> Floats:
        """Between ranks interpolated as numpy does, each rank's value read from its bucket."""
        ranks = shares * (self.count - 1)
        below = self._at(np.floor(ranks))
        return below + (self._at(np.ceil(ranks)) - below) * (ranks - np.floor(ranks))

    def _at(self, ranks: Floats) -> Floats:
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
        """Chan, Golub and LeVeque's pairwise update: sums of plain squares would cancel."""
        count, total = len(values), float(values.sum())
        squares = float(np.square(values - total / count).sum())
        if self._count:
            apart = total / count - self._total / self._count
            squares += apart * apart * self._count * count / (self._count + count)
        self._count += count
        self._total += total
        self._squares += squares
