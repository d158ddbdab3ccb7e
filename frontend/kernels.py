"""Questions to the kernels, in a process of their own, since the frontend does not load the native extension."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def ask_kernels(module: str, *arguments: str) -> Any:
    """Run `python -m quire.kernels.MODULE`; return the JSON that it prints. Raises RuntimeError with its message."""
    # -P: folders in the current directory must not shadow packages
    command = [sys.executable, "-P", "-m", f"quire.kernels.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"quire.kernels.{module} exited with status {done.returncode}"]
        raise RuntimeError(lines[-1].removeprefix("error: "))
    return json.loads(done.stdout)


def readable_size(size: int) -> str:
    """Return a size in bytes with a binary unit, such as `1.5 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
