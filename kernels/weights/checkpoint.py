"""Checkpoint folders: config.json and safetensors files, mapped and never copied as a whole.

A safetensors file has eight bytes of header length (little endian), a JSON header that maps names to dtype, shape and
byte range, then the data. A folder holds `model.safetensors`, or `model.safetensors.index.json` naming its shards.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.kernels._native import checksum
from quire.kernels.errors import ModelError
from quire.kernels.host import describe_address_limit
from quire.kernels.regular_files import open_regular
from quire.kernels.weights.expert_tensors import find_correction, find_expert, other_names
from quire.kernels.weights.tensor import FLOAT_DTYPES, INTEGER_DTYPES, Tensor

__all__ = ["FLOAT_DTYPES", "INTEGER_DTYPES", "Checkpoint", "Tensor", "read_config", "stored_names"]

_KNOWN = FLOAT_DTYPES | INTEGER_DTYPES | {"F8_E4M3": ("f8_e4m3", 1)}
_MAX_HEADER_BYTES = 100_000_000  # also of JSON files
_LONGEST_NAME = 256
_MOST_DIMENSIONS = 32
_SAMPLE_BYTES = 1024
_LARGEST_VOCABULARY = 1 << 31


T = TypeVar("T")


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


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
        generation = _read(path, dict[str, Any], "a JSON object") if path.exists() else {}
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
        for name, file in _read(index, _Index, "a safetensors index").weight_map.items():
            _check_name(index, name)
            _check_name(index, file)
            if Path(file).name != file:
                raise ModelError(
                    f"{index}: tensor {name} is said to be in {file!r}, which is not a file of this folder"
                )
            files.setdefault(self.folder / file, []).append(name)
        return files

    def _open(self, path: Path, promised: list[str]) -> None:
        try:
            with open_regular(path) as file:
                size = path.stat().st_size
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            raise _unopened(path, error) from None
        header_bytes = int.from_bytes(mapped[:8], "little") if mapped and size >= 8 else -1
        if mapped is None or not 0 < header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(
                f"{path} is not a safetensors file, or is truncated: {size} bytes, header of {header_bytes}"
            )
        problem = f"{path}: its safetensors header can't be read"
        header = _decoded(mapped[8 : 8 + header_bytes], dict[str, msgspec.Raw], problem)
        header.pop("__metadata__", None)
        for name in header:
            _check_name(path, name)
        entries = {name: _decoded(entry, _Entry, f"{problem}, tensor {name}") for name, entry in header.items()}
        self._maps[path] = mapped
        data = np.frombuffer(mapped, np.uint8, offset=8 + header_bytes)
        for name, entry in entries.items():
            _check_entry(path, name, entry, len(data))
        _check_layout(path, entries, len(data))
        for name, entry in entries.items():
            self._add(name, entry, data)
        missing = [name for name in promised if name not in entries]
        if missing:
            raise ModelError(f"{path} lacks tensor {missing[0]}, which the index says is in it")

    def _add(self, name: str, entry: _Entry, data: npt.NDArray[np.uint8]) -> None:
        if entry.dtype not in _KNOWN:  # buffers such as attention masks; `get` reports one that is needed
            self._foreign[name] = entry.dtype
            return
        begin, end = entry.data_offsets
        self._tensors[name] = Tensor(name, _KNOWN[entry.dtype][0], tuple(entry.shape), data[begin:end])

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
    return name, base, f"language_model.{name}", f"model.language_model.{base}"


def _unopened(path: Path, error: OSError) -> ModelError:
    """Return the error for a file that cannot be opened or mapped."""
    if error.errno == errno.ENOMEM:
        limit = describe_address_limit()
        return ModelError(
            f"{path} can't be mapped: its {path.stat().st_size} bytes exceed the address space left{limit}"
        )
    return ModelError(f"{path}: {error.strerror}; the checkpoint is incomplete")


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder. Raises ModelError."""
    path = folder / "config.json"
    try:
        text = _bounded(path)
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}" + _instead(folder, "a checkpoint folder needs a config.json")
        ) from None
    return _decoded(text, dict[str, Any], f"{path} is not a JSON object")


def _instead(folder: Path, otherwise: str) -> str:
    """Return the end of an error about a folder without a checkpoint: what it has instead, and what to do."""
    if gguf := sorted(folder.glob("*.gguf")):
        return f"; it has GGUF files: give the path of one, as {gguf[0]}"
    if (folder / "adapter_config.json").exists():
        return (
            "; it has an adapter (LoRA), and adapters are not supported: merge it into its model with peft's "
            "merge_and_unload, save that, and give its folder"
        )
    if pickled := [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pth")), *sorted(folder.glob("*.pt"))]:
        return (
            f"; it has {pickled[0].name}, which is a program to run: convert it with transformers, by "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
        )
    return f"; {otherwise}"


def _bounded(path: Path) -> bytes:
    with open_regular(path) as file:
        text = file.read(_MAX_HEADER_BYTES + 1)
    if len(text) > _MAX_HEADER_BYTES:
        raise ModelError(f"{path} has more than {_MAX_HEADER_BYTES} bytes; it is not the JSON file of a checkpoint")
    return text


def _read(path: Path, kind: type[T], what: str) -> T:
    """Return the JSON in a file as `kind`. Raises ModelError."""
    problem = f"{path} can't be read as {what}"
    try:
        text = _bounded(path)
    except OSError as error:
        raise ModelError(f"{problem}: {error.strerror}") from None
    return _decoded(text, kind, problem)


def _decoded(text: bytes | msgspec.Raw, kind: type[T], problem: str) -> T:
    """Return JSON as `kind`. Raises ModelError with a message that begins with `problem`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:  # DecodeError, or UnicodeDecodeError
        raise ModelError(f"{problem}: {error}") from None


def _check_name(path: Path, name: str) -> None:
    """Raise ModelError for a name that errors could not quote in one line."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise ModelError(
            f"{path}: the name {name[:40]!r} of {len(name)} characters is not allowed; names of tensors and files are "
            f"printable, and have at most {_LONGEST_NAME}"
        )


def _check_entry(path: Path, name: str, entry: _Entry, size: int) -> None:
    """Raise ModelError unless the tensor lies in the `size` bytes of data and has the bytes of its shape."""
    begin, end = entry.data_offsets
    _check_name(path, entry.dtype)
    if len(entry.shape) > _MOST_DIMENSIONS or max(begin, end, *entry.shape) >> 63:
        raise ModelError(f"{path}: tensor {name} has a shape or a range of bytes that no file can have")
    if min(entry.shape, default=0) < 0 or not 0 <= begin <= end:
        raise ModelError(
            f"{path}: tensor {name} can't have the shape {entry.shape} and the bytes from {begin} to {end}; "
            "sizes are 0 or more, and a range does not end before its begin"
        )
    if end > size:
        raise ModelError(f"{path} is truncated: tensor {name} ends at byte {end} of the data, but the file has {size}")
    if entry.dtype not in _KNOWN:
        return
    expected = _KNOWN[entry.dtype][1] * math.prod(entry.shape)
    if end - begin != expected:
        raise ModelError(
            f"{path}: tensor {name} of shape {entry.shape} and type {entry.dtype} needs {expected} bytes, "
            f"but {end - begin} are given"
        )


def _check_layout(path: Path, entries: dict[str, _Entry], size: int) -> None:
    """Raise ModelError unless the tensors follow one another and fill the data, as the format demands."""
    last, last_end = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin < last_end:
            raise ModelError(
                f"{path}: tensors {last} and {name} overlap from byte {begin} of the data on; the file is damaged"
            )
        if begin > last_end:
            raise ModelError(
                f"{path}: no tensor has the bytes from {last_end} to {begin}, before tensor {name}; the file is damaged"
            )
        last, last_end = name, end
    if last_end != size:
        raise ModelError(
            f"{path}: no tensor has the last {size - last_end} bytes; the file is damaged, or its header incomplete"
        )
