"""Checkpoint folders: config.json and safetensors files, mapped and never copied as a whole.

A folder holds `model.safetensors`, or `model.safetensors.index.json` naming its shards.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.kernels._native import checksum
from quire.kernels.errors import ModelError
from quire.kernels.weights.expert_tensors import find_correction, find_expert, other_names
from quire.kernels.weights.json_files import decoded, read_bounded, read_json
from quire.kernels.weights.safetensors_file import check_name, open_safetensors
from quire.kernels.weights.tensor import FLOAT_DTYPES, INTEGER_DTYPES, Tensor

__all__ = ["FLOAT_DTYPES", "INTEGER_DTYPES", "Checkpoint", "Tensor", "read_config", "stored_names"]

_SAMPLE_BYTES = 1024
_LARGEST_VOCABULARY = 1 << 31


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """A model folder. Raises ModelError that names what is missing, truncated or inconsistent."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ModelError(
                f"model {folder!r} is not a folder; give a checkpoint folder with config.json and model.safetensors"
            )
        self.config = read_config(self.folder)
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[str, Tensor] = {}
        self._foreign: dict[str, str] = {}  # unsupported dtypes of other tensors
        self._open_all()

    def _open_all(self) -> None:
        """Map the files and enter their tensors into `_maps` and `_tensors`."""
        for file, names in self._files().items():
            self._open(file, names)

    def eos_token_ids(self) -> list[int]:
        """Return the tokens that end an answer, from generation_config.json or else config.json.

        Ids that no vocabulary has, such as -1 for no token, are left out.
        """
        path = self.folder / "generation_config.json"
        generation = read_json(path, dict[str, Any], "a JSON object") if path.exists() else {}
        ids = generation.get("eos_token_id", self.config.get("eos_token_id"))
        ids = ids if isinstance(ids, list) else [ids]
        return [i for i in ids if type(i) is int and 0 <= i < _LARGEST_VOCABULARY]

    def _files(self) -> dict[Path, list[str]]:
        """Return the safetensors files, each with the tensors that the index promises in it."""
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if single.exists():
            return {single: []}
        if not index.exists():
            raise ModelError(
                f"{self.folder} has neither model.safetensors nor model.safetensors.index.json"
                + _instead(self.folder, "convert the checkpoint to safetensors")
            )
        files: dict[Path, list[str]] = {}
        for name, file in read_json(index, _Index, "a safetensors index").weight_map.items():
            check_name(index, name)
            check_name(index, file)
            if Path(file).name != file:
                raise ModelError(
                    f"{index}: tensor {name} is said to be in {file!r}, which is not a file of this folder"
                )
            files.setdefault(self.folder / file, []).append(name)
        return files

    def _open(self, path: Path, promised: list[str]) -> None:
        self._maps[path], file = open_safetensors(path)
        self._tensors.update(file.tensors)
        self._foreign.update(file.foreign)
        missing = [name for name in promised if name not in file.tensors and name not in file.foreign]
        if missing:
            raise ModelError(f"{path} lacks tensor {missing[0]}, which the index says is in it")

    def has(self, name: str) -> bool:
        """Return True if there is a tensor `name`, of any dtype."""
        return self._find(name) is not None

    def has_floats(self, name: str) -> bool:
        """Return True if there is a tensor `name` of floats."""
        found = self._find(name)
        return isinstance(found, Tensor) and found.dtype in FLOAT_DTYPES

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the float tensor `name`, which must have `shape`.

        Names in base models lack the prefix (`model.`), those of the text part of a multimodal model have another one.
        """
        return self._get(name, shape, tuple(FLOAT_DTYPES))

    def get_integers(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return the tensor `name`, which must have `shape` and the safetensors dtype `dtype`."""
        return self._get(name, shape, (dtype,))

    def _find(self, name: str) -> Tensor | str | None:
        """Return the tensor `name`, or only its dtype if that is not supported."""
        for other in (name, *other_names(name)):
            found = self._find_stored(other)
            if found is not None:
                return found
        return find_correction(name, self._find_stored) or find_expert(name, self._find_stored)

    def _find_stored(self, name: str) -> Tensor | str | None:
        """Return the tensor that the checkpoint calls `name`, maybe with another prefix."""
        for key in _with_prefixes(name):
            if key in self._tensors or key in self._foreign:
                return self._tensors.get(key) or self._foreign[key]
        return None

    def _get(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        tensor = self._find(name)
        if tensor is None:
            *most, last = (dtype.lower() for dtype in dtypes)
            types = f"{', '.join(most)} or {last}" if most else last
            raise ModelError(
                f"{self.folder}: tensor {name} of shape {list(shape)} is missing "
                f"({types}); the checkpoint has {len(self._tensors)} tensors"
            )
        dtype = tensor if isinstance(tensor, str) else tensor.dtype
        if isinstance(tensor, str) or dtype not in dtypes:
            raise ModelError(f"{self.folder}: tensor {name} is of type {dtype}; supported are {', '.join(dtypes)}")
        if tensor.shape != shape:
            raise ModelError(
                f"{self.folder}: tensor {name} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}"
            )
        return tensor

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name, but for experts that a GGUF file has stacked."""
        return self._tensors

    @property
    def formats(self) -> set[str]:
        """Dtypes of the float tensors."""
        return {tensor.format for tensor in self._tensors.values() if tensor.dtype in FLOAT_DTYPES}

    def digest(self) -> bytes:
        """Return a hash of the files' headers, sizes and times, and of samples of every tensor."""
        found = hashlib.blake2b(digest_size=32)
        for path, mapped in sorted(self._maps.items()):
            status = path.stat()  # unlike mtime, ctime cannot be set
            times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
            found.update(f"{path.name} {len(mapped)} {times}".encode() + self._header(path, mapped))
        for stored in self._stored():
            for start in (0, len(stored) // 2, max(0, len(stored) - _SAMPLE_BYTES)):
                found.update(stored[start : start + _SAMPLE_BYTES].tobytes())
        return found.digest()

    def _stored(self) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of all tensors, in the order of their names."""
        return [tensor.stored for _, tensor in sorted(self._tensors.items())]

    def _header(self, path: Path, mapped: mmap.mmap) -> bytes:
        """Return the header of a file, or a hash of it."""
        return mapped[: 8 + int.from_bytes(mapped[:8], "little")]

    def content_digest(self) -> bytes:
        """Return a hash of all that the files contain. It takes seconds where they are large."""
        sums = [(path.name, checksum(np.frombuffer(mapped, np.uint8))) for path, mapped in sorted(self._maps.items())]
        return repr(sums).encode()

    def drop_pages(self) -> None:
        """Release the mapped pages, so that they do not count as resident memory."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)


def stored_names(name: str) -> list[str]:
    """Return all names that checkpoints may have for the tensor that the graph calls `name`, that one first."""
    return [key for other in (name, *other_names(name)) for key in _with_prefixes(other)]


def _with_prefixes(name: str) -> tuple[str, ...]:
    if name.startswith("mtp."):  # without it, the names of a head's tensors are those of the model's
        return (name,)
    base = name.split(".", 1)[-1]
    return name, base, f"language_model.{name}", f"language_model.{base}", f"model.language_model.{base}"


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder. Raises ModelError."""
    path = folder / "config.json"
    try:
        text = read_bounded(path)
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}" + _instead(folder, "a checkpoint folder needs a config.json")
        ) from None
    return decoded(text, dict[str, Any], f"{path} is not a JSON object")


def _instead(folder: Path, otherwise: str) -> str:
    """Return the end of an error about a folder without a checkpoint: what it has instead, and what to do."""
    if gguf := sorted(folder.glob("*.gguf")):
        return f"; it has GGUF files: give the path of one, as {gguf[0]}"
    if (folder / "adapter_config.json").exists():
        return (
            "; it has an adapter (LoRA): give the model that it was trained on, and the adapter by "
            f"--lora-modules NAME={folder}"
        )
    if pickled := [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pth")), *sorted(folder.glob("*.pt"))]:
        return (
            f"; it has {pickled[0].name}, which is a program to run: convert it with transformers, by "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
        )
    return f"; {otherwise}"
