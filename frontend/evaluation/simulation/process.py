"""The process in which engines are simulated, and what goes to it and comes back."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import IO

import msgspec

from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.simulation import SimulatedRequest, SimulationOutput, SimulationSetup, read_frame, write_frame

_REQUESTS_AT_ONCE = 64


class SimulationError(RuntimeError):
    """A simulation that failed; the text is what it said."""


def simulate(setup: SimulationSetup, requests: Iterable[WorkloadRequest]) -> Generator[SimulationOutput, None, None]:
    """What comes of requests, which are in order of arrival: lists of results and samples, and at last the end.

    Both ways go through pipes that hold little, so that neither requests nor results ever pile up. The process is gone
    when the iterator is closed. Raises SimulationError with what the process said, and whatever `requests` raises once
    all that came before has been simulated.
    """
    # -P: folders in the current directory must not shadow packages
    command = [sys.executable, "-P", "-m", "quire.engine_core.simulation"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            feeder = _Feeder(process.stdin, setup, requests)
            yield from _outputs(process.stdout)
            _check_end(process)
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):  # what the feeder has written may not have gone out
                process.stdin.close()
    feeder.join()
    if feeder.error is not None:
        raise feeder.error


def _outputs(stream: IO[bytes]) -> Iterator[SimulationOutput]:
    decoder = msgspec.msgpack.Decoder(SimulationOutput)
    while (frame := read_frame(stream)) is not None:
        yield decoder.decode(frame)


def _check_end(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace").strip()
    if process.wait() != 0:
        lines = said.splitlines() or [f"the simulation ended with status {process.returncode}"]
        raise SimulationError(lines[-1].removeprefix("error: "))


class _Feeder(threading.Thread):
    """Writes the setup and the requests, as fast as they are read."""

    def __init__(self, stream: IO[bytes], setup: SimulationSetup, requests: Iterable[WorkloadRequest]) -> None:
        super().__init__(name="quire-simulation-feeder", daemon=True)
        self.error: Exception | None = None
        self._stream = stream
        self._setup = setup
        self._requests = requests
        self.start()

    def run(self) -> None:
        """Ends with the requests, or when nobody reads them."""
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
        finally:  # also what came before a row that is bad
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
