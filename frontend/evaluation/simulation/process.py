"""Process that simulates engines, and the streams to and from it."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

import msgspec

from quire.frontend.children import start_child
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.simulation import SimulatedRequest, SimulationOutput, SimulationSetup, read_frame, write_frame

_REQUESTS_AT_ONCE = 64
_MOST_BLOCKED_MS = 500  # in which a signal may go unnoticed


class SimulationError(RuntimeError):
    """A simulation that failed; the text is the last line of its stderr."""


def simulate(setup: SimulationSetup, requests: Iterable[WorkloadRequest]) -> Generator[SimulationOutput, None, None]:
    """Simulate requests in order of arrival; yield lists of results and samples, and finally the end.

    Both directions go through pipes of limited size, so neither requests nor results pile up. The process is gone when
    the iterator is closed. Raises SimulationError with the last line of the process's stderr, and what `requests`
    raises once all requests before that have been simulated.
    """
    # -P: folders in the current directory must not shadow packages
    command = [sys.executable, "-P", "-m", "quire.engine_core.simulation", str(os.getpid())]
    pipe = subprocess.PIPE
    with start_child(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            feeder = _Feeder(process.stdin, setup, requests)
            yield from _outputs(process.stdout)
            _check_end(process)
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):  # the feeder may have written what was not flushed
                process.stdin.close()
    feeder.join()
    if feeder.error is not None:
        raise feeder.error


class _PolledPipe(io.RawIOBase):
    """A pipe that is read without blocking for long, so that no signal waits for the next bytes.

    The handler of a signal runs when the main thread is back from what it calls. A blocking read that a signal
    interrupts returns, but not one that begins just after it.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        """Read from a pipe of which nobody has read; its owner closes it."""
        self._fd = pipe.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes, none at the end."""
        while not self._poll.poll(_MOST_BLOCKED_MS):
            pass
        return os.readv(self._fd, [buffer])


def _outputs(pipe: IO[bytes]) -> Iterator[SimulationOutput]:
    decoder = msgspec.msgpack.Decoder(SimulationOutput)
    stream = io.BufferedReader(_PolledPipe(pipe))
    while (frame := read_frame(stream)) is not None:
        yield decoder.decode(frame)


def _check_end(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    stderr = io.BufferedReader(_PolledPipe(process.stderr)).read().decode(errors="replace").strip()
    if process.wait() != 0:
        lines = stderr.splitlines() or [f"the simulation ended with status {process.returncode}"]
        raise SimulationError(lines[-1].removeprefix("error: "))


class _Feeder(threading.Thread):
    """Thread that writes the setup and the requests, as fast as the process reads them."""

    def __init__(self, stream: IO[bytes], setup: SimulationSetup, requests: Iterable[WorkloadRequest]) -> None:
        super().__init__(name="quire-simulation-feeder", daemon=True)
        self.error: Exception | None = None
        self._stream = stream
        self._setup = setup
        self._requests = requests
        self.start()

    def run(self) -> None:
        """Write until the requests end, or the process reads no more."""
        try:
            with self._stream:
                self._write()
        except BrokenPipeError:
            pass
        except Exception as error:  # noqa: BLE001 - raised again where the results are read
            self.error = error

    def _write(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        write_frame(self._stream, encode(self._setup))
        waiting: list[SimulatedRequest] = []
        try:
            for index, request in enumerate(self._requests):
                waiting.append(_simulated(index, request))
                if len(waiting) == _REQUESTS_AT_ONCE:
                    write_frame(self._stream, encode(waiting))
                    waiting.clear()
        finally:  # a bad row must not drop the requests before it
            write_frame(self._stream, encode(waiting))


def _simulated(index: int, request: WorkloadRequest) -> SimulatedRequest:
    return SimulatedRequest(
        index,
        request.arrival,
        request.prompt_tokens,
        request.output_tokens,
        list(request.blocks),
        request.block_tokens,
        request.session,
        request.delay,
    )
