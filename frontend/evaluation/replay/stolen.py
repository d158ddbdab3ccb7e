"""CPU time that this host wanted and its hypervisor gave to others."""

from __future__ import annotations

from pathlib import Path

_NOTABLE_SHARE = 0.01
_STAT = Path("/proc/stat")  # man 5 proc_stat
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq and softirq of its first line, in ticks
_STOLEN = 7


class StolenTime:
    """Counts from when it is made."""

    def __init__(self, path: Path = _STAT) -> None:
        self._path = path
        self._begun = self._read()

    @property
    def share(self) -> float | None:
        """Of the time that all CPUs were busy or robbed, from 0 to 1; None where the system does not tell."""
        now = self._read()
        if self._begun is None or now is None:
            return None
        busy, stolen = (after - before for before, after in zip(self._begun, now, strict=True))
        return stolen / (busy + stolen) if busy + stolen > 0 else 0.0

    def _read(self) -> tuple[int, int] | None:
        try:
            with self._path.open(encoding="ascii") as lines:
                ticks = [int(word) for word in next(lines).split()[1:]]
            return sum(ticks[place] for place in _BUSY), ticks[_STOLEN]
        except (OSError, ValueError, IndexError, StopIteration):
            return None


def explain(share: float | None) -> str | None:
    """What such a share means for what was measured; None if there is nothing to say."""
    if share is None or share < _NOTABLE_SHARE:
        return None
    return f"others had {share:.1%} of this host's CPU time (steal): times are longer than they would be without them"
