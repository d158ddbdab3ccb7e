"""A GPU that the CPU emulates: a driver that runs the kernels' PTX, as `cuda/ptx_to_c.py` translates it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.kernels._native import host_features
from quire.kernels.host import cache_folder

_SOURCES = Path(__file__).parent / "cuda"


def build(folder: Path) -> dict[str, str]:
    """Build the driver in a folder. Return the environment of processes that have the GPU.

    Skips the test on a machine whose CPU can't stand for one: its code is that of x86-64, with AVX2, FMA and F16C.
    """
    if platform.machine() != "x86_64" or not {"avx2", "fma", "f16c"} <= set(host_features()):
        pytest.skip(f"the emulated GPU needs an x86-64 CPU with AVX2, FMA and F16C; this is {platform.machine()}")
    library = folder / "libcuda.so.1"
    command = ["cc", "-O2", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    sources = [str(_SOURCES / name) for name in ("driver.c", "block.c")]
    subprocess.run([*command, *sources, "-o", str(library), "-ldl"], check=True)
    translator = _SOURCES / "ptx_to_c.py"
    version = hashlib.sha256(translator.read_bytes() + (_SOURCES / "block.h").read_bytes())
    kept = cache_folder() / "emulated" / version.hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "QUIRE_PTX_FOLDER": str(kept),
        "QUIRE_PTX_TO_SO": shlex.join([sys.executable, str(translator)]),
    }


@contextmanager
def for_processes(folder: Path) -> Iterator[None]:
    """Give the GPU to all processes that are started meanwhile; the driver is built in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in build(folder).items():
            patch.setenv(name, value)
        yield


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Give this process the GPU; the driver is built in `folder`."""
    for name, value in build(folder).items():
        if name != "LD_LIBRARY_PATH":  # which is read when a process starts; the driver is found by its name instead
            monkeypatch.setenv(name, value)
    ctypes.CDLL(str(folder / "libcuda.so.1"), mode=os.RTLD_LOCAL)
