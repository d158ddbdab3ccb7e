"""Writing of a safetensors file of any size, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels.weights.tensor import FLOAT_DTYPES, INTEGER_DTYPES

_ALIGNMENT = 8


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return (FLOAT_DTYPES | INTEGER_DTYPES)[self.dtype][1] * math.prod(self.shape)


def write_safetensors(path: Path, entries: list[FileTensor], data: Iterable[npt.NDArray[np.generic]]) -> None:
    """Write the tensors `entries`, whose data follow one another in pieces of any size. Raises OSError."""
    header, end = dict[str, object](__metadata__={"format": "pt"}), 0
    for entry in entries:
        offsets = [end, end := end + entry.bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in data:
            file.write(np.ascontiguousarray(piece).data)
            written += piece.nbytes
    if written != end:
        raise ValueError(f"{path}: {written} bytes of data were given, but the tensors have {end}")
