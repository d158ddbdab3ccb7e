"""Tensors of adapters, in memory and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels.adapters.adapter import Floats
from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.errors import ModelError
from quire.kernels.weights.tensor import FLOAT_DTYPES, Tensor

MOST_NAMED = 3
"""Tensors that an error names."""

_MOST_OF_ONE = 5  # tensors that change one of the base: A, B, a bias or a magnitude, a whole one, and rows of tokens
_ENTRY_BYTES, _OTHER_BYTES = 256, 1 << 18  # of a header: for a tensor, twice what it takes, and for metadata
_CHUNK = 1 << 20
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


def most_tensors(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many tensors an adapter of a base model with the tensors `shapes` has at most."""
    return _MOST_OF_ONE * len(shapes)


def most_header_bytes(tensors: int) -> int:
    """Return the size of the header of so many tensors at most."""
    return _OTHER_BYTES + _ENTRY_BYTES * tensors


def check_form(path: Path, tensor: StoredTensor, shape: tuple[int, ...], reason: str) -> None:
    """Raise ModelError unless a tensor is of floats, and has the `shape` that a `reason` asks for."""
    if tensor.format.upper() not in FLOAT_DTYPES:
        raise not_of_floats(path, tensor.name, tensor.format)
    check_shape(path, tensor, shape, reason)


def not_of_floats(path: Path, name: str, dtype: str) -> ModelError:
    """Return the error for a tensor of another dtype than those of adapters."""
    return ModelError(f"{path}: tensor {name} is of type {dtype}; adapters are f32, f16 or bf16; save it as such")


def check_shape(path: Path, tensor: StoredTensor, shape: tuple[int, ...], reason: str) -> None:
    """Raise ModelError unless a tensor has the `shape` that a `reason` asks for."""
    if tensor.shape != shape:
        raise ModelError(
            f"{path}: tensor {tensor.name} has shape {list(tensor.shape)}, but {reason} asks for {list(shape)}; give "
            "an adapter of this base model"
        )


def loaded(file: AdapterFile, stored: StoredTensor) -> Tensor:
    """Read a tensor of floats. Raises ModelError for one that is not finite."""
    tensor = file.tensor(stored)
    check_finite(file.path, tensor.name, tensor.format, tensor.stored)
    return tensor


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
