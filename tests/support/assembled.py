"""What NVIDIA's assembler says of kernels. It is kept: models share kernels, which are assembled once for all tests."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from quire.kernels.devices.ptx_assembler import PtxAssembler, find_assembler
from quire.kernels.host import cache_folder


@functools.cache
def assembler() -> PtxAssembler:
    """Return the assembler. Skips the test where there is none."""
    found = find_assembler()
    if found is None:
        pytest.skip("NVIDIA's assembler is not here: it is in the extra ptxas")
    return found


def resources(ptx: str) -> dict[str, int]:
    """Return what a kernel takes of a GPU, as PtxAssembler does. Raises ModelError if it can't be assembled."""
    kept = _folder() / hashlib.sha256(ptx.encode()).hexdigest()
    if not kept.exists():
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(assembler().resources(ptx)))
        new.replace(kept)
    return msgspec.json.decode(kept.read_bytes(), type=dict[str, int])


@functools.cache
def _folder() -> Path:
    """Return the folder of what this version of the assembler says."""
    version = subprocess.run([assembler().path, "--version"], capture_output=True, check=True).stdout
    folder = cache_folder() / "assembled" / hashlib.sha256(version).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder
