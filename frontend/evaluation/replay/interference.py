"""Interference with a measurement on the client's host: CPU steal time and garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOTABLE_SHARE = 0.01
_STAT = Path("/proc/stat")  # man 5 proc_stat
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq and softirq of its first line, in ticks
_STEAL = 7
_GC_THRESHOLDS = (50_000, 20, 1000)


class StealTime:
    """CPU time that this host wanted and its hypervisor gave to other guests, from the construction on."""

    def __init__(self, path: Path = _STAT) -> None:
        self._path = path
        self._begun = self._read()

    @property
    def share(self) -> float | None:
        """Steal time as a share (0 to 1) of busy and steal time of all CPUs; None where the system has no counts."""
        now = self._read()
        if self._begun is None or now is None:
            return None
        busy, steal = (after - before for before, after in zip(self._begun, now, strict=True))
        return steal / (busy + steal) if busy + steal > 0 else 0.0

    def _read(self) -> tuple[int, int] | None:
        try:
            with self._path.open(encoding="ascii") as lines:
                ticks = [int(word) for word in next(lines).split()[1:]]
            return sum(ticks[place] for place in _BUSY), ticks[_STEAL]
        except (OSError, ValueError, IndexError, StopIteration):
            return None


def explain_steal(share: float | None) -> str | None:
    """Return what this share of steal time means for a measurement, or None if it is unknown or negligible."""
    if share is None or share < _NOTABLE_SHARE:
        return None
    return f"other guests had {share:.1%} of this host's CPU time (steal): without them, times would be shorter"


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage seldom, and nothing that exists already.

    A run makes hardly any cycles but many long-lived objects; a full collection visits all of them while requests wait
    to be sent.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
