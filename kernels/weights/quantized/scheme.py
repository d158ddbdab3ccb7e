"""Quantized matrices, the interface of quantization schemes, and helpers that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quire.kernels._native import GgufMatrix, Mxfp4Matrix
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor

Words = npt.NDArray[np.signedinteger | np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BITS = (4, 8)
GROUPS = (32, 64, 128)
WHOLE_ROW = -1
"""Group size in checkpoints for a group that spans the whole row."""

_BLOCK_ROWS = 64  # rows of words that are unpacked at once, so that they stay in the cache


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix w[n, k] = (values - zeros) * scales.

    `values` is u8 [n, k], up to 15 or 255. `scales` is f32 [n, groups]; `zeros` is u8 [n, groups], or None if the
    format has no zero points. Column j of values belongs to input `order[j]`, i32 [k]; None means j itself. All arrays
    are contiguous; values may be the mapped file itself.
    """

    format: QuantizedFormat
    values: Bytes
    scales: Floats
    zeros: Bytes | None
    order: npt.NDArray[np.int32] | None

    def rows(self, first: int, count: int) -> QuantizedMatrix:
        """Return the `count` outputs from number `first` on."""
        rows = slice(first, first + count)
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], zeros=zeros)

    def to_f32(self) -> Floats:
        """Return the values that it stands for, f32 [n, k], in the order of the inputs."""
        span = self.format.span(self.values.shape[1])
        zeros = np.float32(self.format.middle) if self.zeros is None else _spread(self.zeros, span, self.values)
        found = (self.values - zeros) * _spread(self.scales, span, self.values)
        if self.order is not None:
            found[:, self.order] = found.copy()
        return found


def _spread(of_groups: Bytes | Floats, span: int, values: Bytes) -> Floats:
    """Return what each value has of what its group has."""
    return np.repeat(of_groups.astype(np.float32), span, axis=1)[:, : values.shape[1]]


@dataclass(frozen=True)
class DequantizedMatrix(Tensor):
    """The f32 values of a quantized matrix; `data` is a copy."""

    matrix: QuantizedMatrix

    @property
    def data(self) -> Bytes:
        """The bytes of the values."""
        return self.rows(0, self.shape[0]).data

    def rows(self, first: int, count: int) -> Tensor:
        """See Tensor: only these rows are computed."""
        values = self.matrix.rows(first, count).to_f32()
        return Tensor(self.name, self.format, values.shape, values.reshape(-1).view(np.uint8))


@dataclass(frozen=True)
class Layer:
    """Quantization of a module. `reordered` is act-order, where the columns of a group are not contiguous; `packed`
    values share words."""

    format: QuantizedFormat
    reordered: bool = False
    packed: bool = True


class Scheme(ABC):
    """Method of a quantized checkpoint: selects the quantized modules and reads them.

    A module is named as in the checkpoint, `model.layers.0.self_attn.q_proj`; only linear layers are requested.
    """

    method: ClassVar[str]
    """`quant_method` in config.json."""

    @abstractmethod
    def _layer(self, module: str) -> Layer | None:
        """Return how the module is quantized, None if it is not."""

    @abstractmethod
    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        """Return a quantized module's tensors by the last part of their names; check names, dtypes and shapes."""

    @abstractmethod
    def _unpack(self, tensors: dict[str, Tensor], layer: Layer, n: int, k: int) -> tuple[Bytes, Floats, Bytes | None]:
        """Return `values`, `scales` and `zeros` of a QuantizedMatrix, in the order of the checkpoint's columns."""

    def _order(self, tensors: dict[str, Tensor], layer: Layer) -> npt.NDArray[np.int32] | None:
        """Return the `order` of a QuantizedMatrix; the natural one unless a scheme has another."""
        return None

    def _quantized(self, module: str) -> Layer:
        layer = self._layer(module)
        if layer is None:
            raise ValueError(f"{module} is not quantized")
        return layer

    def format_of(self, module: str) -> QuantizedFormat | None:
        """Return the module's format, None if it is not quantized."""
        layer = self._layer(module)
        return None if layer is None else layer.format

    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> QuantizedMatrix:
        """Read a quantized module of `n` outputs and `k` inputs. Raises ModelError as `check` does."""
        layer, tensors = self._quantized(module), self._tensors(checkpoint, module, n, k)
        order = self._order(tensors, layer)
        values, scales, zeros = self._unpack(tensors, layer, n, k)
        if order is not None:
            values = np.take(values, order, axis=1)
        return QuantizedMatrix(layer.format, values, scales, zeros, order)

    def dequantized(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> Tensor:
        """Return the values that a quantized module stands for. Raises ModelError as `check` does."""
        matrix = self.read(checkpoint, module, n, k)
        return DequantizedMatrix(module, "f32", (n, k), matrix.values.reshape(-1), matrix)

    def blocks(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> GgufMatrix | Mxfp4Matrix | None:
        """Return a module's matrix in blocks that are packed as they are, None if it has to be read."""
        return None

    def order(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> npt.NDArray[np.int32] | None:
        """Return the `order` of a quantized module without reading its matrix."""
        return self._order(self._tensors(checkpoint, module, n, k), self._quantized(module))

    def check(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> None:
        """Raise ModelError for the first tensor of a quantized module that is missing or has a wrong dtype or shape."""
        self._tensors(checkpoint, module, n, k)


def in_block(module: str) -> bool:
    """Return True if the module is in a numbered block of the model, unlike embeddings and the head."""
    return any(part.isdigit() for part in module.split("."))


def order_of(indices: Tensor, group: int) -> npt.NDArray[np.int32] | None:
    """Return the column order i32 [k] that makes groups contiguous, given each column's group; None if they are."""
    given = indices.to_numpy().astype(np.int32)
    natural = np.arange(len(given), dtype=np.int32) // (group or max(len(given), 1))
    if np.array_equal(given, natural):
        return None
    order = np.argsort(given, kind="stable").astype(np.int32)
    if not np.array_equal(given[order], natural):
        raise ModelError(
            f"tensor {indices.name} must name each of the groups 0 to {natural[-1]} "
            f"for {group or len(given)} inputs, but it does not"
        )
    return order


# Unpacking: a matrix of 4096 by 11008 takes some tens of milliseconds


def words_for(count: int, bits: int) -> int:
    """Return the number of words that hold `count` values; the last one may be padded."""
    return -(-count * bits // 32)


def unpack(words: Words, bits: int, count: int) -> Bytes:
    """Unpack `count` values of each row, lowest bits first: u8 [rows, count] from 32-bit words [rows, words]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return np.ascontiguousarray(packed[:, :count])
    rows, columns = packed.shape
    out = np.empty((rows, columns), "<u2")
    for row in range(0, rows, _BLOCK_ROWS):  # the byte 0xHL becomes the bytes 0x0L, 0x0H
        wide = packed[row : row + _BLOCK_ROWS].astype("<u2")
        out[row : row + _BLOCK_ROWS] = (wide | wide << 4) & 0x0F0F
    return np.ascontiguousarray(out.view(np.uint8)[:, :count])


def unpack_transposed(words: Words, bits: int, count: int) -> Bytes:
    """Unpack `count` values of each column: u8 [columns, count] from 32-bit words [words, columns]."""
    return unpack(transposed(words), bits, count)


def transposed(words: Words) -> Words:
    """Return a copy of `words` [rows, columns] as [columns, rows]."""
    out = np.empty(words.shape[::-1], words.dtype)
    for row in range(0, len(words), _BLOCK_ROWS):
        out[:, row : row + _BLOCK_ROWS] = words[row : row + _BLOCK_ROWS].T
    return out
