"""Trials of what nobody has vouched for: in a process of its own, within limits that the kernel enforces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from quire.protocol.parent_death import end_with_parent
from quire.protocol.process_limits import limit_process

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
# Others would reserve address space.


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """The end of a trial: its exit status, negative for a signal, and what it has written."""

    status: int
    written: bytes

    @property
    def took_too_long(self) -> bool:
        """True if the trial has used up its time."""
        return self.status == -signal.SIGXCPU


def run_trial(module: str, *arguments: str, given: bytes = b"", seconds: float) -> TrialEnd:
    """Run a module, whose process calls `begin_trial`, for so many seconds at most; `given` is its standard input."""
    command = [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments]
    try:
        trial = subprocess.run(
            command, input=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, check=False,
            env={**os.environ, **_ONE_THREAD}, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return TrialEnd(-signal.SIGXCPU, error.stdout or b"")
    return TrialEnd(trial.returncode, trial.stdout)


def begin_trial(*, memory: int, cpu_seconds: int) -> None:
    """Limit this process, and end it with its parent, which `run_trial` names in the first argument."""
    end_with_parent(int(sys.argv[1]))
    limit_process(memory=memory, cpu_seconds=cpu_seconds)
