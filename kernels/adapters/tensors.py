"""Tensors of adapters, in memory and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels.adapters.adapter import Floats
from quire.kernels.errors import ModelError
from quire.kernels.weights.json_files import MAX_BYTES, read_bounded
from quire.kernels.weights.tensor import FLOAT_DTYPES, Tensor

MOST_TENSORS = 100_000
MOST_NAMED = 3
"""Tensors that an error names."""

_CHUNK = 1 << 20
_LARGEST_ELEMENT = 4  # bytes
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "bf16": (np.uint16, 0x7F80),
    "f16": (np.uint16, 0x7C00),
    "f32": (np.uint32, 0x7F800000),
}
"""By format: elements as integers, and the bits that only NaN and infinity have all set."""


def is_missing(path: Path) -> bool:
    """Return True if there is no such file; other errors are those of reading it."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def read_file(path: Path, shapes: Mapping[str, tuple[int, ...]], max_rank: int) -> bytes:
    """Return the content of an adapter's file, in memory: one that is truncated later does not harm the process.

    Raises ModelError if it can't be read, or is larger than all that an adapter can change in the tensors `shapes`.
    """
    elements = sum(math.prod(shape) + (sum(shape) + 2) * max_rank for shape in shapes.values())
    try:
        return read_bounded(path, MAX_BYTES + _LARGEST_ELEMENT * elements, "give an adapter of this base model")
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None
    except MemoryError:
        raise ModelError(f"{path} can't be read: there is too little memory for it") from None


def checked(path: Path, tensor: Tensor, shape: tuple[int, ...], reason: str) -> Tensor:
    """Return a tensor that must be finite floats and have `shape`, for a `reason`. Raises ModelError."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise ModelError(
            f"{path}: tensor {tensor.name} is of type {tensor.format}; adapters are f32, f16 or bf16; save it as such"
        )
    check_shape(path, tensor, shape, reason)
    check_finite(path, tensor.name, tensor.format, tensor.stored)
    return tensor


def check_shape(path: Path, tensor: Tensor, shape: tuple[int, ...], reason: str) -> None:
    """Raise ModelError unless a tensor has the `shape` that a `reason` asks for."""
    if tensor.shape != shape:
        raise ModelError(
            f"{path}: tensor {tensor.name} has shape {list(tensor.shape)}, but {reason} asks for {list(shape)}; give "
            "an adapter of this base model"
        )


def check_finite(path: Path, name: str, format_: str, stored: npt.NDArray[np.uint8]) -> None:
    """Raise ModelError if there is an element that is NaN or infinite."""
    kind, exponent = _EXPONENTS[format_]
    mask = kind(exponent)
    elements = stored.view(kind)
    for start in range(0, len(elements), _CHUNK):
        if np.any(elements[start : start + _CHUNK] & mask == mask):
            raise ModelError(
                f"{path}: tensor {name} has elements that are NaN or infinite; adapters must be finite: save it from a "
                "checkpoint of the training before they came up"
            )


def scaled(path: Path, tensor: Tensor, scale: float) -> Floats:
    """Return a finite tensor times a number, as f32. Raises ModelError if that is infinite."""
    with np.errstate(over="ignore"):
        product = (tensor.to_f32().astype(np.float64) * scale).astype(np.float32)
    check_finite(path, tensor.name, "f32", product.view(np.uint8))
    return product
