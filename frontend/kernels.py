"""Questions to the kernels, in a process of their own, since the frontend does not load the native extension."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from quire.frontend.children import start_child


def ask_kernels(module: str, *arguments: str, timeout: float | None = None) -> Any:
    """Run `python -m quire.kernels.MODULE`; return the JSON that it prints.

    Raises RuntimeError with its message, and if it takes more than `timeout` seconds.
    """
    with start_child(_command(module, arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            output, errors = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"quire.kernels.{module} has not answered within {timeout:g} s; try again") from None
        finally:
            child.kill()  # nothing, if it has ended
    if child.returncode != 0:
        raise _failure(module, child.returncode, errors.decode(errors="replace"))
    return json.loads(output)


def follow_kernels(module: str, *arguments: str) -> Iterator[Any]:
    """Run `python -m quire.kernels.MODULE`; yield the lines of JSON that it prints. Raises RuntimeError as above.

    The process is ended if the caller stops before it does. Its threads share the work themselves: numpy's own would
    only wait for each other.
    """
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            _command(module, arguments), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
            status = process.wait()
        finally:
            process.terminate()  # nothing, if it has ended
        if status != 0:
            errors.seek(0)
            raise _failure(module, status, errors.read())


def _command(module: str, arguments: tuple[str, ...]) -> list[str]:
    # -P: folders in the current directory must not shadow packages
    return [sys.executable, "-P", "-m", f"quire.kernels.{module}", *arguments]


def _failure(module: str, status: int, said: str) -> RuntimeError:
    lines = said.strip().splitlines() or [f"quire.kernels.{module} exited with status {status}"]
    return RuntimeError(lines[-1].removeprefix("error: "))


def readable_size(size: int) -> str:
    """Return a size in bytes with a binary unit, such as `1.5 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
