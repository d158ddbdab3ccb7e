"""Limits that a process sets to itself before it works for somebody who may want to exhaust it."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_process(*, memory: int, stack: int | None = None, cpu_seconds: int | None = None) -> None:
    """Let the kernel enforce limits: bytes of memory above what is in use and of the stack, CPU time, no core dumps."""
    limits = {resource.RLIMIT_AS: memory_in_use() + memory, resource.RLIMIT_CORE: 0}
    if stack is not None:
        limits[resource.RLIMIT_STACK] = stack
    if cpu_seconds is not None:
        limits[resource.RLIMIT_CPU] = cpu_seconds
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def memory_in_use() -> int:
    """Return the bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
