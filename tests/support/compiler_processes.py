"""The processes in which an engine compiles grammars."""

from __future__ import annotations

from pathlib import Path


def children(process: int) -> list[int]:
    """Return the children of all threads of a process."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def compilers_of(engine: int) -> list[int]:
    """Return the processes that fork an engine's workers: one, or none while it is being replaced."""
    return [pid for pid in children(engine) if b"compiler_process" in _command_line(pid)]


def processes_of(engine: int) -> list[int]:
    """Return the process that forks the workers, and these."""
    [process] = compilers_of(engine)
    return [process, *children(process)]


def _command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
