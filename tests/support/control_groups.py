"""File systems that hold the files of control groups only."""

from __future__ import annotations

from pathlib import Path


def cgroup(root: Path, membership: str, files: dict[str, str]) -> str:
    """Make a file system with /proc/self/cgroup and the given cgroup files only; return its root."""
    for name, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)
