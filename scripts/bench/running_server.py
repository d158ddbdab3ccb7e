"""A running `quire serve`, and what its processes take of the machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class RunningServer:
    """A running server: its addresses and processes."""

    url: str
    engine_address: str
    pid: int
    engine_pid: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time so far of the server and of the engine."""
        return _cpu_seconds(self.pid), _cpu_seconds(self.engine_pid)

    def open_files(self) -> int:
        """Return the number of file descriptors of the server."""
        return open_files(self.pid)

    def resident_mib(self) -> float:
        """Return the resident memory of the server."""
        return resident_mib(self.pid)


def children_of(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started, in that order."""
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def open_files(pid: int) -> int:
    """Return the number of file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def serving(arguments: list[str]) -> Iterator[RunningServer]:
    """Start a server, and end it with the `with`."""
    command = [sys.executable, "-P", "-c", "from quire.frontend.cli import main; main()", "serve", "--port", "0"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            engine = re.search(r"at (\S+)", process.stdout.readline())
            http = re.search(r"at (http\S+)", process.stdout.readline())
            assert engine is not None
            assert http is not None
            yield RunningServer(http[1], engine[1], process.pid, children_of(process.pid)[0])
        finally:
            process.terminate()
