"""GGUF files, version 2 and 3 (little endian), mapped and never copied as a whole.

A file has a header of metadata, typed values by key, then a table of tensors, each with its sizes (innermost first),
its type and its offset in the data, which begins at the next multiple of `general.alignment`. A model may be divided
into files `NAME-00001-of-00003.gguf`, of which the first has the metadata.

Every count and length is checked against the bytes that are left before anything is read. Source: the specification
in ggml's repository, docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.errors import ModelError
from quire.kernels.regular_files import open_regular

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Tensor types by their numbers: name, elements of a block, bytes of a block."""

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_ARRAYS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_SMALLEST_ENTRY = 8 + 4 + 1  # bytes of a key's length, a type and a value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_MOST_DIMENSIONS = 4
_LARGEST_HEADER = 1 << 26  # bytes; vocabularies of 262,144 tokens take some 15 MB
_LONGEST_LIST = 1 << 22
_LONGEST_NAME = 256  # of a key or a tensor; llama.cpp takes tensors up to 63
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a mapped file: `shape` has the outermost size first, `data` is its bytes, unaligned."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufEntry:
    """A tensor in the header of a file: its `num_bytes` bytes from `start` on; otherwise as GgufTensor."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufLimits:
    """The most that a header may have: bytes, elements of each list, and tensors."""

    header_bytes: int = _LARGEST_HEADER
    list_length: int = _LONGEST_LIST
    tensors: int = _LONGEST_LIST


@dataclass(frozen=True)
class GgufModel:
    """The metadata of a model and its tensors by name; `maps` and `header_bytes` are those of each of its files."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    maps: dict[Path, mmap.mmap]
    header_bytes: dict[Path, int]


def gguf_files(path: Path) -> list[Path]:
    """Return all files of the model whose first or only file is `path`. Raises ModelError for another shard."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    if int(match["number"]) != 1:
        first = f"{match['stem']}-00001-of-{match['count']}.gguf"
        raise ModelError(f"{path} is a part of a model; give its first part, {first}, and it finds the others")
    return [
        path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
        for number in range(1, max(1, int(match["count"])) + 1)
    ]


def read_gguf(files: list[Path]) -> GgufModel:
    """Map the files of a model and read their headers. Raises ModelError for the first that is damaged or missing."""
    model = GgufModel({}, {}, {}, {})
    for number, path in enumerate(files):
        model.maps[path] = _map(path)
        _parse(model, path, model.maps[path], number, len(files))
    return model


def parse_gguf_header(
    path: Path, beginning: bytes, size: int, limits: GgufLimits
) -> tuple[dict[str, Any], list[GgufEntry]]:
    """Return the metadata and the tensors of a model of one file of `size` bytes, from its first `header_bytes` ones.

    Raises ModelError if it is damaged, or has more than `limits`.
    """
    header = _HeaderReader(path, beginning, size, limits)
    header.read()
    _check_shard(path, header.metadata, 0, 1)
    tensors: dict[str, GgufEntry] = {}
    for entry in header.tensors():
        if entry.name in tensors:
            raise _twice(path, entry.name)
        tensors[entry.name] = entry
    return header.metadata, list(tensors.values())


def _parse(model: GgufModel, path: Path, content: mmap.mmap, number: int, count: int) -> None:
    """Enter the metadata and the tensors of one of the files of a model."""
    header = _HeaderReader(path, content, len(content), GgufLimits())
    header.read()
    if number == 0:
        model.metadata.update(header.metadata)
    _check_shard(path, header.metadata, number, count)
    model.header_bytes[path] = header.position
    data = np.frombuffer(content, np.uint8)
    for entry in header.tensors():
        if entry.name in model.tensors:
            raise _twice(path, entry.name)
        stored = data[entry.start : entry.start + entry.num_bytes]
        model.tensors[entry.name] = GgufTensor(entry.name, entry.type, entry.shape, stored)


def _twice(path: Path, name: str) -> ModelError:
    return ModelError(f"{path}: there are two tensors of the name {name}; the file is damaged")


def _map(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            if path.stat().st_size == 0:
                raise ModelError(f"{path} is empty; a GGUF file begins with the letters GGUF")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; give a GGUF file, with all of its parts beside it") from None


def _check_shard(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    given = metadata.get("split.no", 0), metadata.get("split.count", 1) or 1
    if given != (number, count):
        raise ModelError(
            f"{path} says that it is part {repr(given[0])[:40]} (from 0) of {repr(given[1])[:40]}, but its name that "
            f"it is part {number} of {count}; give the files the names that they were published with"
        )


class _HeaderReader:
    """Reader of the header of a file of `size` bytes; `position` is the byte that it has come to."""

    def __init__(self, path: Path, content: mmap.mmap | bytes, size: int, limits: GgufLimits) -> None:
        self.metadata: dict[str, Any] = {}
        self.position = 0
        self._path = path
        self._bytes = content
        self._size, self._limits = size, limits
        self._entries: list[tuple[str, tuple[int, ...], int, int]] = []

    def read(self) -> None:
        """Read the header up to the data."""
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with the letters GGUF")
        version = self._number(_U32)
        if version not in (2, 3):
            big_endian = ", big endian" if version in (2 << 24, 3 << 24) else ""
            raise self._error(f"is of GGUF version {version}{big_endian}; supported are 2 and 3, little endian")
        num_tensors = self._count("tensors", _SMALLEST_TENSOR, self._limits.tensors)
        for _ in range(self._count("metadata entries", _SMALLEST_ENTRY, self._limits.list_length)):
            key = self._name()
            if key in self.metadata:
                raise self._error(f"has {key} twice in its metadata")
            self.metadata[key] = self._value(key)
        for _ in range(num_tensors):
            name = self._name()
            num_dimensions = self._number(_U32)
            if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                raise self._error(f"gives tensor {name} {num_dimensions} dimensions; 1 to {_MOST_DIMENSIONS} can be")
            shape = tuple(self._number(_U64) for _ in range(num_dimensions))[::-1]
            self._entries.append((name, shape, self._number(_U32), self._number(_U64)))

    def tensors(self) -> Iterator[GgufEntry]:
        """Yield the tensors, in the order of the data."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._error(f"has general.alignment {repr(alignment)[:40]}; it must be a power of two")
        start = -(-self.position // alignment) * alignment
        last, last_end = "", start
        offsets = np.fromiter((offset for *_, offset in self._entries), np.uint64)
        for entry in np.argsort(offsets, kind="stable"):  # unlike `sorted`, it does not hold the GIL
            name, shape, number, offset = self._entries[entry]
            if number not in TYPES:
                known = ", ".join(kind for kind, *_ in TYPES.values())
                raise self._error(f"has tensor {name} in ggml's type {number}, which is not known; known are {known}")
            kind, block, block_bytes = TYPES[number]
            if min(shape) < 1 or shape[-1] % block or offset % alignment:
                raise self._error(
                    f"gives tensor {name} of type {kind} the shape {list(shape)} at offset {offset}; the last size "
                    f"must be a multiple of {block}, the offset of {alignment}"
                )
            begin = start + offset
            end = begin + math.prod(shape) // block * block_bytes
            if begin < last_end:
                raise self._error(f"is damaged: tensors {last} and {name} overlap")
            if end > self._size:
                raise self._error(f"is truncated: tensor {name} ends at byte {end}, but the file has {self._size}")
            last, last_end = name, end
            yield GgufEntry(name, kind, shape, begin, end - begin)

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} {problem}")

    def _take(self, count: int) -> bytes:
        if count > self._size - self.position:
            raise self._error(f"is truncated, or damaged: its header goes on after its {self._size} bytes")
        if self.position + count > self._limits.header_bytes:
            raise self._error(f"is damaged: its header goes on beyond byte {self._limits.header_bytes}")
        taken = self._bytes[self.position : self.position + count]
        self.position += count
        return taken

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _count(self, what: str, smallest: int, most: int) -> int:
        """Read the number of things that take at least `smallest` bytes each."""
        count: int = self._number(_U64)
        if count * smallest > self._size - self.position:
            raise self._error(f"is truncated, or damaged: it promises {count} {what}, but has {self._size} bytes")
        if count > most:
            raise self._error(f"is damaged: it promises {count} {what}; the most is {most}")
        return count

    def _string(self) -> str:
        text = self._take(self._number(_U64))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self._error(f"has text that is not UTF-8 in its header: {text[:40]!r}") from None

    def _name(self) -> str:
        """Read the name of a key or a tensor, which errors may quote: it has a bounded length and no line ends."""
        name = self._string()
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise self._error(
                f"is damaged: it has the name {name[:40]!r} of {len(name)} characters; names are printable, and have "
                f"at most {_LONGEST_NAME}"
            )
        return name

    def _value(self, key: str) -> Any:
        kind = self._number(_U32)
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"has {key} of type {kind} in its metadata, which is not known")
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> list[Any]:
        kind = self._number(_U32)
        if kind == _STRING:
            return [self._string() for _ in range(self._count("strings", 8, self._limits.list_length))]
        if kind not in _ARRAYS:
            raise self._error(f"has a list of type {kind} at {key} in its metadata, which is not known")
        dtype = np.dtype(_ARRAYS[kind])
        count = self._count("numbers", dtype.itemsize, self._limits.list_length)
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values
