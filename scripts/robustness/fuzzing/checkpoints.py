"""Target `safetensors`: the loader of checkpoints.

An input is a byte, 0 for model.safetensors and 1 for the index of two shards, and then that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzzing.target import check_message, mutate_json, replace

from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import FLOAT_DTYPES, Checkpoint

_DTYPES = ("F32", "BF16", "F16", "I64", "I32", "I8", "U8", "F64", "BOOL")
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "F64": 8}
_SHARDS = {"a.safetensors": ["first", "model.second"], "b.safetensors": ["third"]}


def _file(names: list[str], dtypes: tuple[str, ...], **more: Any) -> bytes:
    """Return a safetensors file with tensors of shape [3, 2]."""
    header, data = dict(more), b""
    for name, dtype in zip(names, dtypes, strict=False):
        values = bytes(range(6 * _BYTES.get(dtype, 1)))
        header[name] = {"dtype": dtype, "shape": [3, 2], "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    return _with_length(json.dumps(header).encode()) + data


def _with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


class Safetensors:
    """Every file opens as tensors with the bytes of their shapes, or raises ModelError."""

    words = ("dtype", "shape", "data_offsets", "__metadata__", "weight_map", *_DTYPES, *_SHARDS)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "config.json").write_text("{}")
        for file, names in _SHARDS.items():
            (folder / file).write_bytes(_file(names, ("F32", "I32")))

    def seeds(self) -> Iterator[bytes]:
        """See Target."""
        yield b"\0" + _file([f"model.{dtype}.weight" for dtype in _DTYPES], _DTYPES)
        yield b"\0" + _file(["one"], ("BF16",), __metadata__={"format": "pt"})
        yield b"\0" + _file([], ())
        yield b"\1" + json.dumps({"weight_map": {name: file for file in _SHARDS for name in _SHARDS[file]}}).encode()

    def test(self, data: bytes) -> None:
        """See Target."""
        is_index = data[:1] == b"\1"
        replace(self._folder / "model.safetensors", None if is_index else data[1:])
        replace(self._folder / "model.safetensors.index.json", data[1:] if is_index else None)
        try:
            checkpoint = Checkpoint(str(self._folder))
        except ModelError as error:
            if str(self._folder) not in str(error):
                raise AssertionError("the error does not name the file") from error
            check_message(str(error))
            return
        assert len(checkpoint.digest()) == 32
        for name in json.loads(data[1:])["weight_map"] if is_index else _names(data):
            self._read(checkpoint, name)
        checkpoint.drop_pages()

    @staticmethod
    def _read(checkpoint: Checkpoint, name: str) -> None:
        """Read a tensor in the shape that the error names, if it has a supported type."""
        assert checkpoint.has(name)
        for shape in ((3, 2), (2, 3), (6,), ()):
            with suppress(ModelError):
                values = checkpoint.get(name, shape).to_f32()
                assert values.shape == shape
                assert values.dtype == np.float32
            for dtype in _DTYPES:
                if dtype not in FLOAT_DTYPES:
                    with suppress(ModelError):
                        assert checkpoint.get_integers(name, shape, dtype).to_numpy().shape == shape

    def mutate(self, data: bytes, random: Random) -> bytes:
        """See Target."""
        if data[:1] == b"\1":
            return b"\1" + mutate_json(data[1:], random)
        end = 9 + int.from_bytes(data[1:9], "little")
        return b"\0" + _with_length(mutate_json(data[9:end], random)) + data[end:]


def _names(data: bytes) -> list[str]:
    header = json.loads(data[9 : 9 + int.from_bytes(data[1:9], "little")])
    return [name for name in header if name != "__metadata__"]
