"""Engines of one machine with one copy of the weights, whichever of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import DealerClient, EngineUnderTest, command

from quire.kernels.weights.shared_weights import WAITING
from quire.protocol.address import remove_address

# Runs in an engine, as its `sitecustomize`: it stops when some of its weights are packed.
_STOPS = """
import ctypes
from quire.kernels.weights.loader import Loader
pack = Loader.pack
def pack_some(self, matrix, buffer):
    pack(self, matrix, buffer)
    print("PACKED", flush=True)
    ctypes.PyDLL(None).pause()
Loader.pack = pack_some
"""


@pytest.fixture
def weights() -> Iterator[int]:
    fd = os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def engine(model: Path, fd: int) -> EngineUnderTest:
    return EngineUnderTest(model, "--weights-fd", str(fd), pass_fds=[fd])


def tokens(engine: EngineUnderTest) -> list[int]:
    with DealerClient(engine.address) as client:
        client.request("a", temperature=0.0)
        found = client.tokens("a")
        client.wait_until_at_rest()
        return found


def shares(engine: EngineUnderTest) -> dict[str, int]:
    """Return the bytes of an engine's mapping of the weights, as smaps has them."""
    lines = Path(f"/proc/{engine.process.pid}/smaps").read_text().splitlines()
    (first,) = [number for number, line in enumerate(lines) if "quire-weights" in line]
    fields = [line.split() for line in lines[first + 1 : first + 12]]
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in fields}


def test_two_engines_have_one_copy_of_the_weights(demo_model: Path, weights: int) -> None:
    with EngineUnderTest(demo_model) as alone:
        expected = tokens(alone)
    with engine(demo_model, weights) as first, engine(demo_model, weights) as second:
        assert tokens(first) == tokens(second) == expected
        whole = os.fstat(weights).st_size
        found = [shares(first), shares(second)]
        assert [share["Rss"] for share in found] == [whole, whole]
        assert sum(share["Pss"] for share in found) == pytest.approx(whole, rel=0.01)
        first.process.kill()
        first.process.wait()
        assert tokens(second) == expected
        with engine(demo_model, weights) as third:
            assert tokens(third) == expected


def test_an_engine_takes_over_from_one_that_is_killed_while_it_packs(
    demo_model: Path, weights: int, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_STOPS)
    with started(demo_model, weights, path=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}") as killed:
        rest_of_line(killed, "PACKED")
        with started(demo_model, weights, "--beat-seconds", "1") as waiting:
            while (stage := json.loads(rest_of_line(waiting, "STAGE")))["what"] != WAITING:
                assert not stage["waits"]
            assert stage["waits"]
            killed.kill()
            address = rest_of_line(waiting, "READY")
    remove_address(address)
    with EngineUnderTest(demo_model) as alone, engine(demo_model, weights) as reader:
        assert tokens(reader) == tokens(alone)
        assert shares(reader)["Rss"] == os.fstat(weights).st_size


@contextlib.contextmanager
def started(model: Path, fd: int, *flags: str, path: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that need not become ready, with Python modules of `path` too; it is killed."""
    environment = os.environ | ({} if path is None else {"PYTHONPATH": path})
    process = subprocess.Popen(
        command(model, "--weights-fd", str(fd), *flags),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd], env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rest_of_line(process: subprocess.Popen[bytes], word: str) -> str:
    """Read an engine's lines until one begins with the word; return the rest of it."""
    assert process.stdout is not None
    for line in process.stdout:
        first, _, rest = line.decode().strip().partition(" ")
        if first == word:
            return rest
    raise AssertionError(f"the engine has ended without {word}")
