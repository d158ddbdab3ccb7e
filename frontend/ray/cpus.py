"""The CPUs of one of several replicas on a node: an equal part, and whole NUMA nodes where these can be divided."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")


def part_of(cpus: Iterable[int], numa_nodes: dict[int, int], index: int, parts: int) -> set[int]:
    """Return part number `index` of the CPUs, in the order of their NUMA nodes; never an empty one.

    `numa_nodes`: the NUMA node of each CPU; one that is missing counts as the first.
    """
    ordered = sorted(cpus, key=lambda cpu: (numa_nodes.get(cpu, 0), cpu))
    index %= parts
    chosen = ordered[len(ordered) * index // parts : len(ordered) * (index + 1) // parts]
    return set(chosen or ordered)


def numa_nodes() -> dict[int, int]:
    """Return the NUMA node of each CPU of this machine, as far as it is known."""
    return {
        int(cpu.name.removeprefix("cpu")): int(node.name.removeprefix("node"))
        for node in _NODES.glob("node[0-9]*")
        for cpu in node.glob("cpu[0-9]*")
    }


def bind_process(cpus: set[int]) -> None:
    """Bind all threads of this process to some CPUs, and so the processes that they start from now on."""
    for task in _TASKS.iterdir():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), cpus)
