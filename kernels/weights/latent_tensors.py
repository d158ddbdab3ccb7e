"""The layer that expands latents to keys and values (multi-head latent attention), as GGUF files have it.

Attention takes it apart by heads, so it is read as f32, whatever its type.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels._native import GgufMatrix
from quire.kernels.errors import ModelError
from quire.kernels.weights.tensor import FLOAT_DTYPES, Tensor


@dataclass(frozen=True)
class DequantizedTensor(Tensor):
    """The f32 values of `source`, which is of any type; `data` is a copy."""

    source: Tensor

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of the values."""
        return self.rows(0, self.shape[0]).data

    def rows(self, first: int, count: int) -> Tensor:
        """See Tensor: only these rows are computed."""
        values = _to_f32(self.source.rows(first, count))
        return Tensor(self.name, self.format, values.shape, values.reshape(-1).view(np.uint8))


@dataclass(frozen=True)
class JoinedTensor(Tensor):
    """The f32 rows of keys and then of values of one head after the other; `data` is a copy.

    `keys` is [heads, rank, size of a key] and `values` [heads, size of a value, rank], both of any type.
    """

    keys: Tensor
    values: Tensor

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of all rows."""
        return self.rows(0, self.shape[0]).data

    def rows(self, first: int, count: int) -> Tensor:
        """See Tensor: only the heads that these rows belong to are computed."""
        heads, size = self.keys.shape[0], self.shape[0] // self.keys.shape[0]
        start, stop = first // size, min(heads, -(-(first + count) // size))
        keys, values = (_to_f32(part.rows(start, stop - start)) for part in (self.keys, self.values))
        joined = np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, self.shape[1])
        chosen = joined[first - start * size : first - start * size + count]
        return Tensor(self.name, self.format, chosen.shape, chosen.reshape(-1).view(np.uint8))


def dequantized(tensor: Tensor) -> Tensor:
    """Return a tensor of any type as one of floats."""
    if tensor.dtype in FLOAT_DTYPES:
        return tensor
    return DequantizedTensor(tensor.name, "f32", tensor.shape, tensor.stored, tensor)


def latent_tensor(name: str, whole: Tensor | None, keys: Tensor | None, values: Tensor | None) -> Tensor | None:
    """Return the layer `name` of a file that has it `whole`, or as `keys` and `values`; None if it has neither."""
    if whole is not None:
        return dequantized(whole)
    if keys is None or values is None:
        return None
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
        raise ModelError(
            f"the GGUF file has {keys.name} and {values.name} in the shapes {list(keys.shape)} and "
            f"{list(values.shape)}; they must be [heads, rank, keys] and [heads, values, rank]"
        )
    heads, rank, size = keys.shape
    return JoinedTensor(name, "f32", (heads * (size + values.shape[1]), rank), keys.stored, keys, values)


def _to_f32(tensor: Tensor) -> npt.NDArray[np.float32]:
    if tensor.dtype in FLOAT_DTYPES:
        return tensor.to_f32()
    *outer, k = tensor.shape
    try:
        values: npt.NDArray[np.float32] = GgufMatrix(tensor.stored, tensor.dtype, int(np.prod(outer)), k).dequantize()
    except ValueError as error:
        raise ModelError(f"tensor {tensor.name} can't be dequantized: {error}") from None
    return values.reshape(tensor.shape)
