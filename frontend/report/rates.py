"""When tokens came, as the clients saw it."""

from __future__ import annotations

from array import array

import numpy as np

from quire.frontend.report.quantiles import Floats

PER_SECOND = 10
"""Slots in a second."""


class TokenRate:
    """Counts tokens in slots of a tenth of a second since the run began."""

    def __init__(self) -> None:
        self._slots = np.zeros(100 * PER_SECOND)

    def add(self, time: float, tokens: int) -> None:
        """Tokens that came at one moment."""
        slot = max(0, int(time * PER_SECOND))
        self._reserve(slot)
        self._slots[slot] += tokens

    def add_chunks(self, first: float, gaps: array[float], tokens: int) -> None:
        """The tokens of an answer, spread evenly over its chunks: the first, and one after each gap."""
        share = tokens / (len(gaps) + 1)
        times = np.cumsum(np.frombuffer(gaps)) + first
        slots = np.maximum(times * PER_SECOND, 0).astype(np.int64)
        self._reserve(int(slots[-1]))
        np.add.at(self._slots, slots, share)
        self._slots[max(0, int(first * PER_SECOND))] += share

    def in_slots(self, seconds: float) -> Floats:
        """Tokens of each slot of a run of so many seconds; what came after its end is in the last."""
        size = max(1, int(np.ceil(seconds * PER_SECOND)))
        self._reserve(size)
        slots = self._slots[:size].copy()
        slots[-1] += self._slots[size:].sum()
        return slots

    @property
    def most_per_second(self) -> float:
        """Tokens of the best whole second since the run began."""
        return float(self._slots.reshape(-1, PER_SECOND).sum(axis=1).max())

    def _reserve(self, slot: int) -> None:
        if slot >= len(self._slots):
            size = -(-2 * (slot + 1) // PER_SECOND) * PER_SECOND
            self._slots = np.concatenate([self._slots, np.zeros(size - len(self._slots))])


def in_flight(sent: Floats, ended: Floats, times: Floats) -> Floats:
    """How many requests were under way at each of the times."""
    begun = np.searchsorted(np.sort(sent), times, side="right")
    over = np.searchsorted(np.sort(ended), times, side="right")
    return (begun - over).astype(np.float64)


def most_in_flight(sent: Floats, ended: Floats) -> int:
    """The most requests that were under way at once; one that ends as another begins is not with it."""
    return int(in_flight(sent, ended, sent).max(initial=0))
