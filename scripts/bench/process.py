"""Process of a peer: in a group of its own, stopped between its turns, and ended with its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.engines import BenchError

LAST_LINES = 15
END_SECONDS = 5.0  # for a graceful end, before the next signal


class PeerProcess:
    """A running command with its messages in a file; `talks` gives it pipes for standard input and output.

    It has a process group of its own, so that it can be stopped as a whole and Ctrl-C reaches only the benchmark. It
    stays in the benchmark's session, so that the kernel ends a stopped group when the benchmark is killed.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, *, talks: bool = False
    ) -> None:
        self.name = name
        self._closed = False
        self._log = tempfile.NamedTemporaryFile(prefix="bench-peer-", suffix=".log")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else self._log,
                stderr=self._log,
                env=None if environment is None else dict(environment),
                process_group=0,
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"{name} could not be started: {error}") from error

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return True if the process has not ended."""
        return self._process.poll() is None

    def ask(self, line: bytes) -> bytes:
        """Write a line and read one; return an empty line if the process has ended."""
        assert self._process.stdin is not None, "the process does not talk"
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._process.stdout.readline()

    def death(self, doing: str) -> BenchError:
        """Return an error with the exit status and the stderr tail of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        how = "does not answer" if status is None else f"ended with status {status}"
        lines = self.messages.splitlines()[-LAST_LINES:]
        tail = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        return BenchError(f"{self.name} {how} while {doing}. Its last messages:\n{tail}")

    @property
    def messages(self) -> str:
        """Messages of the process on standard error, and on standard output unless it talks there."""
        return Path(self._log.name).read_text(errors="replace")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the group run, and stop it afterwards."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the group: close its input, then send signals until it is gone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._signal(signal.SIGCONT)
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
                self._wait()
            self._signal(signal.SIGTERM)
            self._wait()
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._log.close()

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
