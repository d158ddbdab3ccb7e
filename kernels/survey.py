"""`python -m quire.kernels.survey PATH...`: whether folders and GGUF files can be loaded on this host, as JSON.

`--options JSON` has options of an engine; those that concern the memory of a model are those of `LoadOptions`.

Headers of the files are read, weights are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from quire.kernels import host
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.fit import advised
from quire.kernels.gguf.folder import model_folder
from quire.kernels.memory import PROGRAM_BYTES
from quire.kernels.options import LoadOptions
from quire.kernels.runner import choose_memory, describe
from quire.kernels.weights.checkpoint import read_config


def survey(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint, a folder or a GGUF file, needs of this host with the options that are given.

    `memory_bytes` is its memory without KV pages, `kv_tokens` what the KV pages next to it would hold. A model with
    state has `state_records` of `state_bytes` each besides. `problem` says why it cannot be loaded, None if it can.
    """
    found: dict[str, Any] = {
        "architecture": None, "supported": False, "fits": False, "problem": None,
        "memory_bytes": None, "available_bytes": host.available_memory(), "kv_tokens": None,
        "state_records": None, "state_bytes": None,
    }  # fmt: skip
    try:
        with TemporaryDirectory(prefix="quire-survey-") as root:
            _survey_folder(path if Path(path).is_dir() else str(model_folder(Path(path), Path(root))), given, found)
    except ModelError as error:
        found["problem"] = str(error)
    except Exception as error:  # noqa: BLE001 - one folder must not keep the others from being listed
        found["problem"] = f"it cannot be read: {type(error).__name__}: {error}"
    return found


def _survey_folder(folder: str, given: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Enter what the checkpoint in a folder needs into `found`. Raises ModelError for its problem."""
    found["architecture"] = _architecture(folder)
    known = {field.name for field in fields(LoadOptions)}
    options = LoadOptions(**{name: value for name, value in given.items() if name in known} | {"model": folder})
    plan, _ = describe(options)
    found |= {"supported": True, "memory_bytes": PROGRAM_BYTES + plan.weight_bytes + plan.array_bytes}
    with advised(options):
        size, memory = choose_memory(plan, options)
    found |= {
        "fits": True,
        "memory_bytes": PROGRAM_BYTES + memory.weights + memory.buffers,
        "kv_tokens": size.pages * plan.limits.block_size,
        "state_records": size.records,
        "state_bytes": plan.state_bytes,
    }


def _architecture(folder: str) -> str | None:
    try:
        return ModelConfig(read_config(Path(folder))).architecture
    except (ModelError, ValueError):  # which `describe` explains
        return None


def main() -> None:
    """Print what each checkpoint needs."""
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.survey", description=__doc__)
    parser.add_argument("--options", default="{}", type=msgspec.json.decode, help="options of an engine, as JSON")
    parser.add_argument("paths", nargs="*", help="folders and GGUF files")
    arguments = parser.parse_args()
    found = [survey(path, arguments.options) for path in arguments.paths]
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
