"""This machine: available memory, and the folders of what is kept for a user."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from quire.kernels._native import affinity_cpus, default_threads, physical_cores
from quire.kernels.cgroups import memory_left
from quire.kernels.errors import ModelError

MAX_SHARES = 256
"""Engines that may share a machine."""


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


def resident_memory() -> int:
    """Return the resident bytes of this process."""
    return _process_pages()[1] * resource.getpagesize()


def _process_pages() -> list[int]:
    """Return the pages of this process: of its address space, resident ones, and others."""
    return [int(field) for field in Path("/proc/self/statm").read_text().split()]


def _address_space() -> int | None:
    """Return the bytes left of this process's address space beyond the spare ones; None without a limit."""
    if (limit := _address_limit()) is None:
        return None
    used = _process_pages()[0] * resource.getpagesize()
    return max(0, limit - used - _SPARE_BYTES)


@dataclass(frozen=True)
class MachineShare:
    """One of `count` equal shares of this machine, for one of several engines on it."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> MachineShare:
        """Return the share that "I/N" stands for, and the whole machine for None. Raises ModelError."""
        if text is None:
            return cls()
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count) <= MAX_SHARES):
            raise ModelError(f"machine_share={text!r} is not possible; it must be I/N, with I from 0 to N - 1")
        return cls(int(index), int(count))

    def take_cores(self, threads: int | None) -> int | None:
        """Bind this process to its share of the cores, those of a NUMA node together; return how many threads compute.

        If there are fewer cores than shares, `threads` must be given, and the processes share all cores. Raises
        ModelError.
        """
        if self.count == 1:
            return threads
        cores = sorted(physical_cores(affinity_cpus()), key=lambda core: (core.node, core.cpus))
        usable = len(cores) if threads is not None else min(len(cores), default_threads())
        if usable < self.count:
            if threads is not None:
                return threads
            raise ModelError(
                f"data_parallel_size={self.count} needs as many cores, and this process may use {usable}; start fewer "
                "engines, or set threads, with which they share the cores"
            )
        os.sched_setaffinity(0, {cpu for core in cores[self._part(len(cores))] for cpu in core.cpus})
        part = self._part(usable)
        return threads or part.stop - part.start

    def _part(self, total: int) -> slice:
        return slice(total * self.index // self.count, total * (self.index + 1) // self.count)
