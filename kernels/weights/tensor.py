"""Tensors of checkpoints, as they lie in mapped files."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLOAT_DTYPES = {"BF16": ("bf16", 2), "F16": ("f16", 2), "F32": ("f32", 4)}
"""safetensors dtypes of float tensors: our name, bytes of an element."""

INTEGER_DTYPES = {"I64": ("i64", 8), "I32": ("i32", 4), "I8": ("i8", 1), "U8": ("u8", 1)}
"""safetensors dtypes of quantized weights and their indices: our name, bytes of an element."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a mapped file; `stored` are its bytes there, unaligned."""

    name: str
    format: str
    shape: tuple[int, ...]
    stored: npt.NDArray[np.uint8]

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes, unaligned, with the rows in the order of a model folder."""
        return self.stored

    @property
    def permuted_heads(self) -> int:
        """Number of heads within which `stored` has pairs of rows from both halves beside each other; 0 for none."""
        return 0

    @property
    def dtype(self) -> str:
        """The safetensors dtype."""
        return self.format.upper()

    def to_f32(self) -> npt.NDArray[np.float32]:
        """Return a copy as f32, in the tensor's shape."""
        if self.format == "bf16":
            bits = self.data.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32).reshape(self.shape)
        return self.data.view(np.float16 if self.format == "f16" else np.float32).astype(np.float32).reshape(self.shape)

    def decay_rates(self) -> npt.NDArray[np.float32]:
        """Return -exp(x) of each element x of a float tensor."""
        rates = [-math.exp(logarithm) for logarithm in self.to_f32().reshape(-1).tolist()]  # in f64, then rounded
        return np.array(rates, np.float32).reshape(self.shape)

    def rows(self, first: int, count: int) -> Tensor:
        """Return the `count` rows of a matrix from number `first` on."""
        data = self.data.reshape(self.shape[0], -1)[first : first + count]
        return Tensor(self.name, self.format, (count, *self.shape[1:]), data.reshape(-1))

    def row(self, index: int) -> npt.NDArray[np.float32]:
        """Return a copy of a row of a float matrix as f32."""
        return self.rows(index, 1).to_f32().reshape(self.shape[1:])

    def to_numpy(self) -> npt.NDArray[np.signedinteger | np.unsignedinteger]:
        """Return an integer tensor as a view of the mapped file: read-only, and possibly unaligned."""
        kind, element_bytes = self.format[0], INTEGER_DTYPES[self.dtype][1]
        return self.data.view(f"<{kind}{element_bytes}").reshape(self.shape)
