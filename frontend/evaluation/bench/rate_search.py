"""Finds the highest rate that meets limits, by doubling and then bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_LITTLE = 0.05
"""A share of requests by which a rate may miss and be tried again at once."""
_MOST_DOUBLINGS = 10
"""Unless `high` says otherwise: runs of few requests may meet the limits even if all come at once."""


@dataclass
class RateSearch:
    """Says which rate is to be tried next, in requests a second; `tell` it what became of that.

    From `low` on the rate is doubled until one misses, or until `high` is reached (None: 1024 times `low`). Then the
    middle between the highest that met and the lowest that missed is tried, until they are within `precision` of each
    other, as a share of the former. A rate meets if at least `attainment` of its requests do; a try that is not valid
    misses.

    A host that has something else to do for a while makes a rate miss by chance. So one that misses by at most 5 % of
    the requests is tried a second time at once, and the lowest that missed by more at the end of the search, which
    goes on if it meets then.

    `met` and `missed` are the highest rate that met, and the lowest that missed above it. Raises ValueError for what
    makes no search.
    """

    low: float
    high: float | None = None
    attainment: float = 0.99
    precision: float = 0.05
    met: float | None = field(default=None, init=False)
    missed: float | None = field(default=None, init=False)
    _again: float | None = field(default=None, init=False)  # the rate that is tried a second time at once
    _is_sure: bool = field(default=False, init=False)  # whether `missed` has missed twice

    def __post_init__(self) -> None:
        if not 0 < self.low < math.inf:
            raise ValueError(f"--low {self.low:g} is out of range; it must be above 0 requests a second, and finite")
        if self.high is not None and not self.low <= self.high < math.inf:
            raise ValueError(f"--high {self.high:g} is out of range; it must be at least --low, {self.low:g}")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"--attainment {self.attainment:g} is out of range; it must be above 0 and at most 1")
        if not 0.001 <= self.precision <= 1:
            raise ValueError(f"--precision {self.precision:g} is out of range; it must be from 0.001 to 1")

    @property
    def next_rate(self) -> float | None:
        """The rate to try; None at the end of the search."""
        if self._again is not None:
            return self._again
        if self.missed is None:
            return self._higher()
        if self.met is not None and self.missed > self.met * (1 + self.precision):
            return (self.met + self.missed) / 2
        return None if self._is_sure else self.missed

    def tell(self, share: float | None) -> None:
        """The share of requests that met the limits at `next_rate`; None if the try is not valid."""
        rate = self.next_rate
        assert rate is not None, "the search has ended"
        is_second_try = rate in (self._again, self.missed)
        self._again = None
        if share is not None and share >= self.attainment:
            self.met = rate
            self.missed = None if rate == self.missed else self.missed
        elif share is not None and share >= self.attainment - _LITTLE and not is_second_try:
            self._again = rate
        else:
            self.missed, self._is_sure = rate, is_second_try

    def _higher(self) -> float | None:
        """The rate after one that met, if there is to be any."""
        if self.met is None:
            return self.low
        highest = self.low * 2**_MOST_DOUBLINGS if self.high is None else self.high
        return min(2 * self.met, highest) if self.met < highest else None
