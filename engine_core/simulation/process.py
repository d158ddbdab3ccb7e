"""The simulation process: a setup and lists of requests come as frames on stdin, results go out on stdout.

Requests are read when their time comes and results are written when there are some, so that neither end of a pipe can
outrun the other: the writer waits.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from quire.engine_core.scheduling.policies import POLICIES
from quire.engine_core.simulation.fleet import Fleet
from quire.protocol.errors import ProtocolError
from quire.protocol.parent_death import end_with_parent
from quire.protocol.routing.routers import ROUTERS
from quire.protocol.simulation import (
    SimulatedRequest,
    SimulatedResult,
    SimulationEnd,
    SimulationOutput,
    SimulationSample,
    SimulationSetup,
    read_frame,
    write_frame,
)

_MOST_RESULTS = 256  # that are written together


def main() -> int:
    """Simulate; return the exit status. Errors of the setup or the requests go to stderr.

    The process ends with its parent, if that names itself by its process id.
    """
    if len(sys.argv) > 1:
        end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its owner gets it too, and ends this process
    gc.disable()  # there are no cycles, and each collection would look at all objects
    try:
        _simulate(sys.stdin.buffer, sys.stdout.buffer)
    except (ValueError, RuntimeError, MemoryError, msgspec.MsgspecError, ProtocolError) as error:
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr, flush=True)
        return 1
    except BrokenPipeError:  # the owner is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        gc.enable()
    return 0


def _simulate(inputs: BinaryIO, outputs: BinaryIO) -> None:
    setup = _read_setup(inputs)
    results = ResultWriter(outputs)
    results.add(Fleet(setup, results.add).run(_requests(inputs)))
    results.flush()


class ResultWriter:
    """Writes results in lists, and not later than with the next sample."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: SimulationOutput = []

    def add(self, result: SimulatedResult | SimulationSample | SimulationEnd) -> None:
        """Add a result."""
        self._waiting.append(result)
        if len(self._waiting) >= _MOST_RESULTS or isinstance(result, SimulationSample):
            self.flush()

    def flush(self) -> None:
        """Write the results that wait."""
        write_frame(self._stream, self._encoder.encode(self._waiting))
        self._waiting.clear()


def _read_setup(stream: BinaryIO) -> SimulationSetup:
    if (frame := read_frame(stream)) is None:
        raise ProtocolError("there is no setup; send one before the requests")
    setup = msgspec.msgpack.decode(frame, type=SimulationSetup)
    _check_name("router", setup.router, ROUTERS)
    _check_name("scheduling policy", setup.engine.scheduling_policy, POLICIES)
    for name, number in (
        ("num_engines", setup.num_engines),
        ("sample_seconds", setup.sample_seconds),
        ("concurrency", setup.concurrency),
    ):
        if number is not None and not number > 0:
            raise ValueError(f"{name}={number} is out of range; it must be above 0")
    return setup


def _check_name(what: str, name: str, known: dict[str, type]) -> None:
    if name not in known:
        raise ValueError(f"the {what} {name!r} is not known; it can be {', '.join(known)}")


def _requests(stream: BinaryIO) -> Iterator[SimulatedRequest]:
    decoder = msgspec.msgpack.Decoder(list[SimulatedRequest])
    while (frame := read_frame(stream)) is not None:
        yield from decoder.decode(frame)
