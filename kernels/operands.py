"""What a plan is made of: buffers, weights, and launches of kernels over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.emit.attention import Attention, AttentionFold
from quire.kernels.emit.gemm import Gemm
from quire.kernels.emit.kv import SplitHeads
from quire.kernels.emit.layout import BLOCK, IntegerFormat, Numbers, round_up
from quire.kernels.emit.rows import Embedding, Norm, Quantize

Kernel = Gemm | Embedding | Norm | Quantize | SplitHeads | Attention | AttentionFold


@dataclass(frozen=True)
class Buffer:
    """Memory that launches share. `input` buffers are the runner's own, filled anew for each step."""

    name: str
    bytes: int = 0
    input: bool = False


@dataclass(frozen=True)
class Activations:
    """What a product reads: a buffer of `columns` tiled activations, quantized if `integers` is the weights' format."""

    buffer: Buffer
    columns: int
    integers: IntegerFormat | None = None


@dataclass(frozen=True)
class KvLayer:
    """The KV tiles of one layer."""

    layer: int


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor w[n, k] (or its transpose) that fills every `tile_step`-th tile of a packed matrix."""

    tensor: str
    n: int
    k: int
    transposed: bool = False
    first_tile: int = 0
    tile_step: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The tensor's shape in the checkpoint."""
        return (self.k, self.n) if self.transposed else (self.n, self.k)

    @property
    def strides(self) -> tuple[int, int]:
        """From one n, and one k, to the next in the checkpoint, in elements."""
        return (1, self.n) if self.transposed else (self.k, 1)


@dataclass(frozen=True)
class Matrix:
    """A packed weight matrix of `n` columns by `k`, of integers if `integers` is their format."""

    parts: tuple[Part, ...]
    n: int
    k: int
    integers: IntegerFormat | None = None

    def bytes(self, numbers: Numbers) -> int:
        """Bytes of the packed form."""
        blocks = round_up(self.n, BLOCK) // BLOCK
        if self.integers is not None:
            return blocks * self.integers.block_bytes(self.k)
        return blocks * (round_up(self.k, BLOCK) // BLOCK) * numbers.block_bytes


@dataclass(frozen=True)
class Vector:
    """Tensors of one dimension, one after the other, as f32 padded with zeros to a multiple of 32.

    `interleaved` takes 16 elements of each in turn, as the columns of a gate.
    """

    tensors: tuple[str, ...]
    sizes: tuple[int, ...]
    interleaved: bool = False


@dataclass(frozen=True, eq=False)
class Table:
    """An array that the plan computed, f32 or i32."""

    name: str
    values: npt.NDArray[np.float32] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Rows:
    """A tensor of shape [rows, columns], kept as f32 rows."""

    tensor: str
    rows: int
    columns: int


Operand = Buffer | KvLayer | Matrix | Vector | Table | Rows


@dataclass(frozen=True)
class Launch:
    """A kernel over its operands; `dim`, `per` and `times` as the native `Launch` has them."""

    kernel: Kernel
    operands: tuple[Operand, ...]
    dim: str
    per: int = 1
    times: int = 1
    head: bool = False


@dataclass(frozen=True)
class Limits:
    """Sizes that a plan is made for: tokens of a step, positions of a sequence, tokens of a page."""

    capacity: int
    max_model_len: int
    page_size: int


@dataclass(frozen=True)
class Linear:
    """The tensors of a linear layer, or of several that share their input: (weight, bias or "", outputs).

    `interleaved` takes 16 outputs of each in turn, as the columns of a gate. `head`: it gives the logits.
    """

    tensors: tuple[tuple[str, str, int], ...]
    transposed: bool = False
    interleaved: bool = False
    head: bool = False

    @property
    def bias(self) -> bool:
        """Whether the layers have biases."""
        return bool(self.tensors[0][1])
