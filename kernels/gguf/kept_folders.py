"""The folders made for GGUF files in the user's cache, of which those used last are kept.

Each is `KEY/NAME` in the folder of all. An engine holds the one that it has opened with a shared lock, so that it finds
it again when it is started once more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

MOST = 32
"""Folders that are kept."""


def use(folder: Path) -> bool:
    """Mark a folder as used now. Return False if it is not there."""
    with suppress(PermissionError):
        try:
            os.utime(folder.parent)
        except FileNotFoundError:
            return False
    return folder.is_dir()


@cache
def hold(folder: Path) -> None:
    """Keep a folder until this process ends."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)


def evict(root: Path, most: int = MOST) -> None:
    """Remove the folders that were used least recently, but for `most` and those that a process holds."""
    folders = {folder: _last_use(folder) for folder in root.iterdir()}
    for folder in sorted(folders, key=lambda folder: folders[folder], reverse=True)[most:]:
        if _last_use(folder) == folders[folder]:
            _remove(folder)


def _last_use(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:  # another process has removed it
        return 0


def _remove(folder: Path) -> None:
    locked = []
    try:
        for inner in folder.iterdir():
            locked.append(os.open(inner, os.O_RDONLY | os.O_CLOEXEC))
            fcntl.flock(locked[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = folder.rename(folder.with_name(f"old-{os.getpid()}-{folder.name}"))  # at once, for other processes
        shutil.rmtree(gone, ignore_errors=True)
    except OSError:  # a process holds it, or has removed it
        pass
    finally:
        for descriptor in locked:
            os.close(descriptor)
