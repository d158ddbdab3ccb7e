"""NVIDIA's assembler, which is used where it is there: it shows what a kernel takes of a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from quire.kernels.errors import ModelError

_PACKAGED = "nvidia/*/bin/ptxas"  # of the package nvidia-cuda-nvcc


@dataclass(frozen=True)
class PtxAssembler:
    """`ptxas`, at a path."""

    path: str

    def resources(self, ptx: str) -> dict[str, int]:
        """Assemble PTX for the architecture that it names, and return what a thread or a block of its kernel takes.

        Raises ModelError with the assembler's messages.
        """
        target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
        architecture = target[1] if target else "none"
        command = [self.path, "-v", f"-arch={architecture}", "--output-file", "/dev/null", "/dev/stdin"]
        done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ModelError(f"{self.path} rejects a kernel for {architecture}: {done.stderr.strip()[:2000]}")
        return {
            "registers": _number(r"Used (\d+) registers", done.stderr),
            "shared_bytes": _number(r"(\d+) bytes smem", done.stderr),
            "stack_bytes": _number(r"(\d+) bytes cumulative stack size", done.stderr),
            "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr))),
        }


def find_assembler() -> PtxAssembler | None:
    """Return the assembler on the path, or that of the package nvidia-cuda-nvcc; None if there is none."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob(_PACKAGED))
    path = shutil.which("ptxas") or next(map(str, packaged), None)
    return None if path is None else PtxAssembler(path)


def _number(pattern: str, messages: str) -> int:
    found = re.search(pattern, messages)
    return int(found[1]) if found else 0
