"""Memory that control groups (cgroups, of version 1 or 2) leave to this process, such as those of containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 62  # version 1 has a huge number for no limit


def memory_left(root: Path = Path("/")) -> list[int]:
    """Return the bytes left of each limit that this process's groups and their parents have; page cache is free.

    `root`: where `/proc` and `/sys` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
            found += [_left(folder) for top in tops for folder in _folders(top, path)]
        elif "memory" in controllers.split(","):
            found += [_left_v1(folder) for folder in _folders(root / "sys/fs/cgroup/memory", path)]
    return [left for left in found if left is not None]


def _folders(top: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a group and those of its parents; a container may see only the last of them."""
    own = top / path.lstrip("/")
    return (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _left(folder: Path) -> int | None:
    """Return the bytes left of the limit of a group of version 2, None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used, stat = int((folder / "memory.current").read_text()), _stat(folder)
    except OSError:
        return None
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return None if limit == "max" else max(0, int(limit) - used + cache)


def _left_v1(folder: Path) -> int | None:
    """Return the bytes left of the limit of a group of version 1, None without a limit."""
    try:
        limit = int((folder / "memory.limit_in_bytes").read_text())
        used, stat = int((folder / "memory.usage_in_bytes").read_text()), _stat(folder)
    except OSError:
        return None
    cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    return None if limit >= _UNLIMITED else max(0, limit - used + cache)


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return {name: int(value) for name, value in pairs}
