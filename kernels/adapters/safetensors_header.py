"""Headers of adapters' safetensors files: bounded, read before the data, and without holding the GIL for long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.adapters.tensors import most_header_bytes, not_of_floats
from quire.kernels.errors import ModelError
from quire.kernels.weights.json_files import decoded
from quire.kernels.weights.safetensors_file import KNOWN, METADATA, check_entries, damaged

_PIECE = 1 << 16  # bytes of a header that are decoded at once
_LONGEST_ENTRY = 1 << 10  # bytes


def read_header(file: AdapterFile, most_tensors: int) -> list[StoredTensor]:
    """Return the tensors of a file. Raises ModelError, also for dtypes that no checkpoint may have."""
    path, size = file.path, file.size
    header_bytes = int.from_bytes(file.read(0, 8).tobytes(), "little") if size >= 8 else -1
    if not 0 < header_bytes <= size - 8:
        raise damaged(path, size, header_bytes)
    if header_bytes > most_header_bytes(most_tensors):
        raise ModelError(
            f"{path} has a header of {header_bytes} bytes; those of adapters of this base model have at most "
            f"{most_header_bytes(most_tensors)}: give an adapter of this base model"
        )
    start = 8 + header_bytes
    raw = _decoded(path, file.read(8, header_bytes).tobytes(), most_tensors)
    tensors = []
    for name, entry in check_entries(path, raw, size - start).items():
        if entry.dtype not in KNOWN:
            raise not_of_floats(path, name, entry.dtype)
        begin, end = entry.data_offsets
        tensors.append(StoredTensor(name, KNOWN[entry.dtype][0], tuple(entry.shape), start + begin, end - begin))
    return tensors


def _decoded(path: Path, text: bytes, most_tensors: int) -> dict[str, msgspec.Raw]:
    """Return the entries of a header by name, themselves not decoded."""
    problem, header = f"{path}: its safetensors header can't be read", dict[str, msgspec.Raw]()
    for piece in _pieces(problem, text.strip()):
        header.update(decoded(piece, dict[str, msgspec.Raw], problem))
        if len(header) > most_tensors + 1:
            raise ModelError(
                f"{path} has more than {most_tensors} tensors, the most that adapters of this base model have; give "
                "an adapter of this base model"
            )
    long = [name for name, entry in header.items() if name != METADATA and len(memoryview(entry)) > _LONGEST_ENTRY]
    if long:
        raise ModelError(f"{problem}: an entry has more than {_LONGEST_ENTRY} bytes")
    return header


def _pieces(problem: str, text: bytes) -> Iterator[bytes]:
    """Yield short JSON objects that have the entries of a longer one, divided where one ends."""
    start, end = 1, len(text) - 1
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise ModelError(f"{problem}: it is no JSON object")
    while end - start > _PIECE:
        stop = text.rfind(b"},", start, start + _PIECE) + 1
        if not stop:
            raise ModelError(f"{problem}: an entry has more than {_PIECE} bytes")
        yield b"{" + text[start:stop] + b"}"
        start = stop + 1
    yield b"{" + text[start:end] + b"}"
