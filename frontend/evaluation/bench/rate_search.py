"""Search for the highest rate that meets limits, by doubling and then bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_LITTLE = 0.05
"""Share of requests by which a rate may miss the limits and be tried again at once."""
_MOST_DOUBLINGS = 10
"""Limit without `high`: runs of few requests may meet the limits even if all arrive at once."""


@dataclass
class RateSearch:
    """State of the search: `next_rate` is to be tried next, in requests a second, and its result goes to `record`.

    From `low` on the rate is doubled until one misses the limits, or until `high` is reached (None: 1024 times `low`).
    Then the middle between the highest rate that met and the lowest that missed is tried, until they are within
    `precision` of each other, relative to the former. A rate meets the limits if a share `attainment` of its requests
    does; an invalid try misses.

    A host that is briefly busy makes a rate miss by chance. So a rate that misses by at most 5 % of the requests is
    tried a second time at once, and the lowest one that missed by more at the end of the search, which goes on if it
    meets the limits then.

    `met` and `missed` are the highest rate that met, and the lowest above it that missed. Raises ValueError for
    parameters out of range.
    """

    low: float
    high: float | None = None
    attainment: float = 0.99
    precision: float = 0.05
    met: float | None = field(default=None, init=False)
    missed: float | None = field(default=None, init=False)
    _again: float | None = field(default=None, init=False)  # rate to try a second time at once
    _is_sure: bool = field(default=False, init=False)  # `missed` has missed twice

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
        """Rate to try; None at the end of the search."""
        if self._again is not None:
            return self._again
        if self.missed is None:
            return self._higher()
        if self.met is not None and self.missed > self.met * (1 + self.precision):
            return (self.met + self.missed) / 2
        return None if self._is_sure else self.missed

    def record(self, share: float | None) -> None:
        """Record the share of requests that met the limits at `next_rate`; None if the try is not valid."""
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
        """Return the rate to try after one that met, or None."""
        if self.met is None:
            return self.low
        highest = self.low * 2**_MOST_DOUBLINGS if self.high is None else self.high
        return min(2 * self.met, highest) if self.met < highest else None
