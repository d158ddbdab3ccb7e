"""This machine: available memory, and the folders of what is kept for a user."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from quire.kernels.cgroups import memory_left


def cache_folder(chosen: str | None = None) -> Path:
    """Return the folder of compiled kernels: `chosen`, or `QUIRE_CACHE_DIR`, or the user's cache folder."""
    base = chosen or os.environ.get("QUIRE_CACHE_DIR")
    if base:
        return Path(base)
    return user_cache() / "kernels"


def user_cache() -> Path:
    """Return the folder of all that is kept for a user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def describe_address_limit() -> str:
    """Return words about the limit of this process's address space; none without a limit."""
    limit = _address_limit()
    return "" if limit is None else f" (`ulimit -v` limits the address space to {limit} bytes; raise it)"


def _address_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


_SPARE_BYTES = 512 << 20
"""Address space that stacks, arenas of malloc, the compiler and the sockets take after the model is loaded."""


def available_memory() -> int:
    """Return the bytes available without swapping: the system's, limited by the cgroup, its parents and `ulimit -v`."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    space = _address_space()
    return min([available, *memory_left(), *([] if space is None else [space])])


def _address_space() -> int | None:
    """Return the bytes left of this process's address space beyond the spare ones; None without a limit."""
    if (limit := _address_limit()) is None:
        return None
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return max(0, limit - used - _SPARE_BYTES)
