"""Elements of a plan: buffers, weights, and launches of kernels over them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.kernels.activations import Xielu
from quire.kernels.emit.context import Kernel
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, Dtypes, QuantizedFormat, round_up
from quire.kernels.errors import ModelError
from quire.kernels.rope import QueryScale, Rope
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.tensor import Tensor

_MOST_LOG_RATE = 80.0

Array = npt.NDArray[np.float32] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Memory:
    """Addresses of buffers by name, of weights, of the KV tiles of each layer, and of the first record of state."""

    buffers: Mapping[str, int]
    weights: Mapping[Operand, int]
    kv_layer: Callable[[int], int]
    states: int = 0


class Operand(ABC):
    """Memory that a launch reads or writes."""

    @abstractmethod
    def address(self, memory: Memory) -> int:
        """Return the operand's address."""


@dataclass(frozen=True)
class Buffer(Operand):
    """Memory that launches share, from byte `offset` on.

    `input` buffers belong to the native runner, which fills them for each step.
    """

    name: str
    bytes: int = 0
    input: bool = False
    offset: int = 0

    def address(self, memory: Memory) -> int:
        """See Operand."""
        return memory.buffers[self.name] + self.offset


@dataclass(frozen=True)
class KvLayer(Operand):
    """KV tiles of one layer; `layer` counts those that have any."""

    layer: int

    def address(self, memory: Memory) -> int:
        """See Operand."""
        return memory.kv_layer(self.layer)


@dataclass(frozen=True)
class StatePart(Operand):
    """A layer's part of the first record of state: `bytes` bytes, `first` bytes from its start."""

    first: int
    bytes: int

    def address(self, memory: Memory) -> int:
        """See Operand."""
        return memory.states + self.first


class LoadedOperand(Operand):
    """Memory that is filled once, when the model is loaded."""

    def address(self, memory: Memory) -> int:
        """See Operand."""
        return memory.weights[self]


@dataclass(frozen=True)
class MatrixPart:
    """A checkpoint tensor w[n, k] (or its transpose) that fills every `tile_step`-th tile of a packed matrix.

    With `tensor_n` it is the `n` rows from number `first` on of a tensor that has `tensor_n`, and with `tensor_k` the
    `k` columns from number `first_k` on of one that has `tensor_k`.
    """

    tensor: str
    n: int
    k: int
    transposed: bool = False
    first_tile: int = 0
    tile_step: int = 1
    first: int = 0
    tensor_n: int = 0
    first_k: int = 0
    tensor_k: int = 0

    @property
    def whole_n(self) -> int:
        """Number of rows of the whole tensor."""
        return self.tensor_n or self.n

    @property
    def whole_k(self) -> int:
        """Number of columns of the whole tensor."""
        return self.tensor_k or self.k

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the tensor in the checkpoint."""
        return (self.whole_k, self.whole_n) if self.transposed else (self.whole_n, self.whole_k)

    @property
    def strides(self) -> tuple[int, int]:
        """Strides of n and of k in the checkpoint, in elements."""
        return (1, self.whole_n) if self.transposed else (self.whole_k, 1)

    @property
    def start(self) -> int:
        """First element in the checkpoint's tensor."""
        return self.first * self.strides[0] + self.first_k * self.strides[1]

    def slices(self, rows: int) -> Iterator[MatrixPart]:
        """Yield parts of at most `rows` rows, a multiple of the columns of a tile, that fill the same tiles."""
        for start in range(0, self.n, rows):
            tile, n = self.first_tile + start // TILE_ROWS * self.tile_step, min(rows, self.n - start)
            yield replace(self, n=n, first=self.first + start, tensor_n=self.whole_n, first_tile=tile)


@dataclass(frozen=True)
class Matrix(LoadedOperand):
    """A packed weight matrix of `n` columns by `k`; `quantized` is its format if it is quantized."""

    parts: tuple[MatrixPart, ...]
    n: int
    k: int
    quantized: QuantizedFormat | None = None

    def bytes(self, dtypes: Dtypes) -> int:
        """Return the bytes of the packed form."""
        blocks = round_up(self.n, BLOCK) // BLOCK
        if self.quantized is not None:
            return blocks * self.quantized.block_bytes(self.k)
        return blocks * (round_up(self.k, BLOCK) // BLOCK) * dtypes.block_bytes


class ArrayWeight(LoadedOperand):
    """A weight that kernels read as a plain array of f32 or i32."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the checkpoint tensors that the array is made of."""
        return {}

    @property
    def bytes(self) -> int:
        """Bytes of the array, about."""
        return sum(4 * math.prod(shape) for shape in self.tensors.values())

    @abstractmethod
    def values(self, checkpoint: Checkpoint) -> Array:
        """Read the array."""


class FloatTensors(Protocol):
    """Source of float tensors, such as a checkpoint."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the float tensor `name`, which must have `shape`."""


@dataclass(frozen=True)
class Vector(ArrayWeight):
    """One-dimensional tensors plus `offset`, concatenated as f32 and padded with zeros to a multiple of 32.

    `interleaved` alternates between 16 elements of each, like the columns of interleaved gate and up.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    interleaved: bool = False
    offset: float = 0.0

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See ArrayWeight."""
        return {name: (size,) for name, size in zip(self.names, self.sizes, strict=True)}

    def values(self, checkpoint: FloatTensors) -> Array:
        """See ArrayWeight."""
        parts = [checkpoint.get(*tensor).to_f32() + np.float32(self.offset) for tensor in self.tensors.items()]
        if self.interleaved:
            width = round_up(self.sizes[0], TILE_ROWS)
            padded = [np.pad(part, (0, width - len(part))).reshape(-1, TILE_ROWS) for part in parts]
            parts = [np.stack(padded, axis=1).reshape(-1)]
        values = np.concatenate(parts)
        return np.pad(values, (0, round_up(len(values), BLOCK) - len(values)))


@dataclass(frozen=True)
class Vectors(ArrayWeight):
    """Vectors one after the other, each with its padding."""

    parts: tuple[Vector, ...]

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See ArrayWeight."""
        return {name: shape for part in self.parts for name, shape in part.tensors.items()}

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight."""
        return np.concatenate([part.values(checkpoint) for part in self.parts])


@dataclass(frozen=True, eq=False)
class Table(ArrayWeight):
    """An array that the lowering computed."""

    name: str
    array: Array

    @property
    def bytes(self) -> int:
        """See ArrayWeight."""
        return self.array.nbytes

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight."""
        return self.array


@dataclass(frozen=True)
class RopeTable(ArrayWeight):
    """Sine and cosine of a rotary embedding at the first `positions`, computed when they are loaded."""

    rope: Rope
    positions: int

    @property
    def bytes(self) -> int:
        """Size of the table."""
        return self.positions * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Size of a position."""
        return 8 * (self.rope.dim // 2)

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight."""
        return self.rope.table(self.positions)


@dataclass(frozen=True)
class QueryScales(ArrayWeight):
    """Factors of queries at the first `positions`, f32 [positions], computed when they are loaded."""

    scale: QueryScale
    positions: int

    @property
    def bytes(self) -> int:
        """Size of the table."""
        return self.positions * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Size of a position."""
        return 4

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight."""
        return self.scale.table(self.positions)


@dataclass(frozen=True)
class XieluParameters(ArrayWeight):
    """Parameters of a xIELU as kernels read them, f32 [4]: p, n, beta, epsilon; see Xielu."""

    activation: Xielu

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See ArrayWeight."""
        form = self.activation
        return {form.alpha_p: (1,), form.alpha_n: (1,), form.beta: (), form.epsilon: ()}

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight. The softplus is computed in f64, and rounding hides the last bits of libm's."""
        tensors = (checkpoint.get(*tensor).to_f32().astype(np.float64) for tensor in self.tensors.items())
        alpha_p, alpha_n, beta, epsilon = (float(tensor.reshape(-1)[0]) for tensor in tensors)
        positive, negative = (float(np.logaddexp(0.0, alpha)) for alpha in (alpha_p, alpha_n))
        return np.array([positive, beta + negative, beta, epsilon], np.float32)


@dataclass(frozen=True)
class TensorRows(ArrayWeight):
    """The last `rows` rows of a tensor of shape [first + rows, columns] as f32."""

    name: str
    rows: int
    columns: int
    first: int = 0

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return 4 * self.columns

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See ArrayWeight."""
        return {self.name: (self.first + self.rows, self.columns)}

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight."""
        return np.ascontiguousarray(checkpoint.get(self.name, self.tensors[self.name]).to_f32()[self.first :])


@dataclass(frozen=True)
class Taps(ArrayWeight):
    """Weights of a convolution, a tensor [channels, 1, taps], as f32 [taps, channels]; times `scales` of channels."""

    name: str
    channels: int
    taps: int
    scales: tuple[tuple[int, float], ...] = ()

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See ArrayWeight."""
        return {self.name: (self.channels, 1, self.taps)}

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight."""
        values = checkpoint.get(self.name, self.tensors[self.name]).to_f32().reshape(self.channels, self.taps).T
        if self.scales:
            counts, scales = zip(*self.scales, strict=True)
            values = values * np.repeat(np.array(scales, np.float32), counts)
        return np.ascontiguousarray(values)


@dataclass(frozen=True)
class DecayRates(ArrayWeight):
    """-exp(x) of the tensor x of a layer with state, [heads], as f32."""

    name: str
    heads: int

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See ArrayWeight."""
        return {self.name: (self.heads,)}

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight. Raises ModelError for a rate that no f32 has."""
        tensor = checkpoint.get(self.name, (self.heads,))
        if not (tensor.to_f32() < _MOST_LOG_RATE).all():
            raise ModelError(
                f"{checkpoint.folder}: {self.name} has logarithms of {_MOST_LOG_RATE} or more, or no numbers"
            )
        return np.pad(tensor.decay_rates(), (0, round_up(self.heads, BLOCK) - self.heads))


@dataclass(frozen=True)
class TokenNumbers(ArrayWeight):
    """The tokens of a draft head's outputs, by the i64 tensor `offsets` [outputs]: i + offsets[i], as i32."""

    offsets: str
    outputs: int
    vocab_size: int

    @property
    def bytes(self) -> int:
        """See ArrayWeight."""
        return 4 * self.outputs

    def values(self, checkpoint: Checkpoint) -> Array:
        """See ArrayWeight. Raises ModelError for a token that is not in the vocabulary."""
        offsets = checkpoint.get_integers(self.offsets, (self.outputs,), "I64").to_numpy()
        tokens = np.arange(self.outputs) + offsets
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(wrong):
            raise ModelError(
                f"{checkpoint.folder}: {self.offsets} makes output {wrong[0]} the token {tokens[wrong[0]]}, but the "
                f"vocabulary has {self.vocab_size}"
            )
        return tokens.astype(np.int32)


Weight = Matrix | ArrayWeight


@dataclass(frozen=True)
class PackedActivations:
    """Input of a product: a buffer of `columns` packed activations, quantized for weights of the format `quantized`;
    then `unquantized` may have them as floats too."""

    buffer: Buffer
    columns: int
    quantized: QuantizedFormat | None = None
    unquantized: Buffer | None = None

    @property
    def floats(self) -> Buffer:
        """The activations as floats."""
        found = self.buffer if self.quantized is None else self.unquantized
        assert found is not None, f"{self.buffer.name} has no floats"
        return found


@dataclass(frozen=True)
class Launch:
    """A kernel over its operands, of `repeats` * ceil(dim / rows_per_item) work items; `head` computes logits.

    With `groups`, `copies` * dim rows are divided among that many groups, each group into items of up to rows_per_item.
    The step decides how; the work items are the most that this can be.
    """

    kernel: Kernel
    operands: tuple[Operand, ...]
    dim: str
    rows_per_item: int = 1
    repeats: int = 1
    head: bool = False
    copies: int = 1
    groups: int = 0


@dataclass(frozen=True)
class PlanLimits:
    """Sizes that a plan is made for: tokens of a step, positions of a sequence, tokens of a page, and the adapters at a
    time, of which none has a larger rank."""

    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    max_loras: int = 0
    max_lora_rank: int = 0
