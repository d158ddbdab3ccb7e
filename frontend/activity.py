"""Activity of another process, as the kernel counts it, whether or not that process can tell."""

from __future__ import annotations

from pathlib import Path

_MAJOR_FAULTS, _USER_TIME, _SYSTEM_TIME = 9, 11, 12  # fields of /proc/PID/stat after the name, see proc(5)


class Activity:
    """The work of a process between two samples: whatever reads, packs or compiles takes CPU time."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._last = self._count()
        self.num_idle_samples = 0
        """Samples in a row between which it has done nothing."""

    def sample(self) -> None:
        """Count what it has done since the last sample."""
        now = self._count()
        self.num_idle_samples = self.num_idle_samples + 1 if now == self._last else 0
        self._last = now

    def _count(self) -> tuple[str, ...]:
        try:
            fields = self._stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended, which its owner learns otherwise
            return ()
        return tuple(fields[index] for index in (_MAJOR_FAULTS, _USER_TIME, _SYSTEM_TIME))
