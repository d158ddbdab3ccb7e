"""Token rates and requests in flight over time, as the clients saw them."""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.frontend.evaluation.report.quantiles import Floats

_PER_SECOND = 10  # slots, while a run is short
_NUM_SLOTS = 1 << 15
_MOST_SECONDS = 1 << 16  # seconds that may still get tokens: most of a day

Tenths = NDArray[np.int64]


class TokenRate:
    """Token counts in slots of a tenth of a second since the run began, and the second with the most tokens.

    Memory is bounded for runs of any length: when there would be too many slots, each becomes twice as wide.
    """

    def __init__(self) -> None:
        self._slots = np.zeros(_NUM_SLOTS)
        self._tenths = 1  # of a slot
        self._best = _BestSecond()

    @property
    def width(self) -> float:
        """Width of a slot in seconds."""
        return self._tenths / _PER_SECOND

    @property
    def most_per_second(self) -> float:
        """Most tokens in a whole second since the run began."""
        return self._best.most

    def add(self, time: float, tokens: int) -> None:
        """Add tokens that arrived at one moment."""
        self._add(np.array([time]), tokens)

    def add_chunks(self, first: float, gaps: array[float], tokens: int) -> None:
        """Add an answer's tokens, spread evenly over its increments: the first, and one after each gap."""
        times = np.cumsum(np.concatenate([[first], np.frombuffer(gaps)]))
        self._add(times, tokens / len(times))

    def reach(self, seconds: float) -> None:
        """Widen the slots until they reach that time."""
        while seconds * _PER_SECOND >= self._tenths * _NUM_SLOTS:
            halves = self._slots.reshape(-1, 2).sum(axis=1)
            self._slots = np.concatenate([halves, np.zeros(_NUM_SLOTS // 2)])
            self._tenths *= 2

    def in_slots(self, seconds: float, width: float) -> Floats:
        """Return the tokens in slots of `width` seconds, at least the own width, of a run of `seconds`.

        The last slot includes tokens after the end of the run. Call `reach` with the same seconds before.
        """
        together = round(width / self.width)
        slots = self._slots.reshape(-1, together).sum(axis=1)
        size = max(1, int(np.ceil(seconds / width)))
        return np.concatenate([slots[: size - 1], [slots[size - 1 :].sum()]])

    def _add(self, times: Floats, tokens: float) -> None:
        """Add `tokens` at each of the times, which are in order."""
        self.reach(float(times[-1]))
        tenths: Tenths = np.maximum(times * _PER_SECOND, 0).astype(np.int64)
        np.add.at(self._slots, tenths // self._tenths, tokens)
        self._best.add(tenths // _PER_SECOND, tokens)


class _BestSecond:
    """The most tokens that arrived in a whole second.

    Answers are added roughly in the order of their ends, so when there are too many seconds the counts of the earliest
    are dropped; only their maximum is kept. A dropped second that gets more tokens starts from 0.
    """

    def __init__(self) -> None:
        self.most = 0.0
        self._tokens: defaultdict[int, float] = defaultdict(float)

    def add(self, seconds: Tenths, tokens: float) -> None:
        """Add `tokens` to each of the seconds, which are in order and may repeat."""
        numbers, counts = np.unique(seconds, return_counts=True)
        for second, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._tokens[second] += count * tokens
            self.most = max(self.most, self._tokens[second])
        if len(self._tokens) > _MOST_SECONDS:
            for second in heapq.nsmallest(_MOST_SECONDS // 2, self._tokens):
                del self._tokens[second]


def in_slots(rates: Sequence[TokenRate], seconds: float) -> tuple[float, list[Floats]]:
    """Return the width of a slot, and the tokens of each slot of a run of `seconds` for each of the rates."""
    for rate in rates:
        rate.reach(seconds)
    width = max(rate.width for rate in rates)
    return width, [rate.in_slots(seconds, width) for rate in rates]


def in_flight(sent: Floats, ended: Floats, times: Floats) -> Floats:
    """Return the number of requests in flight at each of the times."""
    begun = np.searchsorted(np.sort(sent), times, side="right")
    over = np.searchsorted(np.sort(ended), times, side="right")
    return (begun - over).astype(np.float64)


def most_in_flight(sent: Floats, ended: Floats) -> int:
    """Return the most requests in flight at once; one that ends as another begins does not overlap it."""
    return int(in_flight(sent, ended, sent).max(initial=0))
