"""Safetensors files: eight bytes of header length (little endian), a JSON header that maps names to dtype, shape and
byte range, then the data.
"""

from __future__ import annotations

import errno
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from quire.kernels.errors import ModelError
from quire.kernels.host import describe_address_limit
from quire.kernels.regular_files import open_regular
from quire.kernels.weights.json_files import MAX_BYTES, decoded
from quire.kernels.weights.tensor import FLOAT_DTYPES, INTEGER_DTYPES, Tensor

KNOWN = FLOAT_DTYPES | INTEGER_DTYPES | {"F8_E4M3": ("f8_e4m3", 1)}
"""Supported dtypes: our name, bytes of an element."""

METADATA = "__metadata__"
"""The entry of a header that is no tensor."""

_LONGEST_NAME = 256
_MOST_DIMENSIONS = 32


class SafetensorsEntry(msgspec.Struct):
    """The entry of a tensor in a header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class SafetensorsFile:
    """The tensors of a file by name, and the dtypes of those whose dtype is not supported, such as masks."""

    tensors: dict[str, Tensor]
    foreign: dict[str, str]


def open_safetensors(path: Path) -> tuple[mmap.mmap, SafetensorsFile]:
    """Map a file and check its header. Raises ModelError if it is damaged."""
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except OSError as error:
        raise _unopened(path, error) from None
    if mapped is None:
        raise damaged(path, 0, -1)
    return mapped, _parse(path, mapped)


def _parse(path: Path, content: mmap.mmap) -> SafetensorsFile:
    """Return the tensors in the content of a file. Raises ModelError if it is damaged."""
    size = len(content)
    header_bytes = int.from_bytes(content[:8], "little") if size >= 8 else -1
    if not 0 < header_bytes <= min(size - 8, MAX_BYTES):
        raise damaged(path, size, header_bytes)
    problem = f"{path}: its safetensors header can't be read"
    header = decoded(content[8 : 8 + header_bytes], dict[str, msgspec.Raw], problem)
    data = np.frombuffer(content, np.uint8, offset=8 + header_bytes)
    entries = check_entries(path, header, len(data))
    found = SafetensorsFile({}, {})
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if entry.dtype in KNOWN:
            found.tensors[name] = Tensor(name, KNOWN[entry.dtype][0], tuple(entry.shape), data[begin:end])
        else:
            found.foreign[name] = entry.dtype
    return found


def check_entries(path: Path, header: dict[str, msgspec.Raw], size: int) -> dict[str, SafetensorsEntry]:
    """Return the entries of the tensors in a header. Raises ModelError unless they fill the `size` bytes of data."""
    header.pop(METADATA, None)
    for name in header:
        check_name(path, name)
    problem = f"{path}: its safetensors header can't be read, tensor"
    entries = {name: decoded(entry, SafetensorsEntry, f"{problem} {name}") for name, entry in header.items()}
    for name, entry in entries.items():
        _check_entry(path, name, entry, size)
    _check_layout(path, entries, size)
    return entries


def damaged(path: Path, size: int, header_bytes: int) -> ModelError:
    """Return the error for a file that has no header."""
    return ModelError(f"{path} is not a safetensors file, or is truncated: {size} bytes, header of {header_bytes}")


def _unopened(path: Path, error: OSError) -> ModelError:
    """Return the error for a file that cannot be opened or mapped."""
    if error.errno == errno.ENOMEM:
        limit = describe_address_limit()
        return ModelError(
            f"{path} can't be mapped: its {path.stat().st_size} bytes exceed the address space left{limit}"
        )
    return ModelError(f"{path}: {error.strerror}; the checkpoint is incomplete")


def check_name(path: Path, name: str) -> None:
    """Raise ModelError for a name that errors could not quote in one line."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise ModelError(
            f"{path}: the name {name[:40]!r} of {len(name)} characters is not allowed; names of tensors and files are "
            f"printable, and have at most {_LONGEST_NAME}"
        )


def _check_entry(path: Path, name: str, entry: SafetensorsEntry, size: int) -> None:
    """Raise ModelError unless the tensor lies in the `size` bytes of data and has the bytes of its shape."""
    begin, end = entry.data_offsets
    check_name(path, entry.dtype)
    if len(entry.shape) > _MOST_DIMENSIONS or max(begin, end, *entry.shape) >> 63:
        raise ModelError(f"{path}: tensor {name} has a shape or a range of bytes that no file can have")
    if min(entry.shape, default=0) < 0 or not 0 <= begin <= end:
        raise ModelError(
            f"{path}: tensor {name} can't have the shape {entry.shape} and the bytes from {begin} to {end}; "
            "sizes are 0 or more, and a range does not end before its begin"
        )
    if end > size:
        raise ModelError(f"{path} is truncated: tensor {name} ends at byte {end} of the data, but the file has {size}")
    if entry.dtype not in KNOWN:
        return
    expected = KNOWN[entry.dtype][1] * math.prod(entry.shape)
    if end - begin != expected:
        raise ModelError(
            f"{path}: tensor {name} of shape {entry.shape} and type {entry.dtype} needs {expected} bytes, "
            f"but {end - begin} are given"
        )


def _check_layout(path: Path, entries: dict[str, SafetensorsEntry], size: int) -> None:
    """Raise ModelError unless the tensors follow one another and fill the data, as the format demands."""
    names, last, last_end = list(entries), "", 0
    ranges = np.fromiter((offset for entry in entries.values() for offset in entry.data_offsets), np.int64)
    for number in np.lexsort((ranges[1::2], ranges[::2])):  # unlike `sorted`, it does not hold the GIL
        name, (begin, end) = names[number], entries[names[number]].data_offsets
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
