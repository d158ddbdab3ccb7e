"""Plans: what a model computes, as a list of kernel launches over named buffers and weights.

A model file describes itself to a `PlanBuilder`, once, without touching memory; `runner.py` then compiles the
kernels, packs the weights and hands the launches to the native runner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.kernels._native import MAX_KV_SPLITS, Dim
from quire.kernels.emit.attention import BLOCK_TOKENS, Attention, AttentionFold, partial_bytes
from quire.kernels.emit.gemm import ROWS_PER_ITEM, Gemm
from quire.kernels.emit.kv import Heads, SplitHeads
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, IntegerFormat, Numbers, round_up
from quire.kernels.emit.rows import Embedding, Norm, Quantize
from quire.kernels.errors import ModelError
from quire.kernels.operands import (
    Activations,
    Buffer,
    Kernel,
    KvLayer,
    Launch,
    Limits,
    Linear,
    Matrix,
    Operand,
    Part,
    Rows,
    Table,
    Vector,
)
from quire.kernels.rope import Rope
from quire.kernels.weights.quantization import Quantization

MOST_INTEGER_K = 65536
"""Inputs of a layer of integers: more could overflow its sums."""


@dataclass
class PlanBuilder:
    """Collects a model's launches. Each method adds one kernel and returns the buffer that it fills.

    Buffers are reused between layers by name; activations are tiled (see emit/layout.py), the hidden state is f32.
    """

    numbers: Numbers
    limits: Limits
    quantization: Quantization
    launches: list[Launch] = field(default_factory=list)
    states: list[Launch] = field(default_factory=list)  # what gives the hidden states, in steps where they are wanted
    buffers: dict[str, Buffer] = field(default_factory=dict)
    vocab_size: int = 0
    hidden_size: int = 0
    heads: Heads = field(default_factory=lambda: Heads(1, 1, 16))
    layers: int = 0
    _tables: dict[Rope, Table] = field(default_factory=dict)
    _kernels: dict[Kernel, Kernel] = field(default_factory=dict)

    # Operands

    def _buffer(self, name: str, size: int) -> Buffer:
        known = self.buffers.get(name)
        if known is None or known.bytes < size:
            self.buffers[name] = Buffer(name, size)
        return Buffer(name)

    def _activations(self, name: str, columns: int) -> Activations:
        rows = round_up(self.limits.capacity, TILE_ROWS)
        buffer = self._buffer(name, rows * round_up(columns, BLOCK) * self.numbers.activation_bytes)
        return Activations(buffer, columns)

    def _integers(self, columns: int, integers: IntegerFormat) -> Activations:
        panels = -(-self.limits.capacity // TILE_ROWS)
        # A buffer for each width and grouping: its padding is never written and stays zero.
        buffer = self._buffer(f"quantized_{columns}_{integers.group}", panels * integers.panel_bytes(columns))
        return Activations(buffer, columns, integers)

    def _floats(self, name: str, columns: int) -> Buffer:
        return self._buffer(name, self.limits.capacity * round_up(columns, BLOCK) * 4)

    def _kernel(self, kernel: Kernel) -> Kernel:
        """One kernel for all launches that need the same code."""
        if kernel not in self._kernels:
            self._kernels[kernel] = replace(kernel, name=f"{kernel.name}_{len(self._kernels)}")
        return self._kernels[kernel]

    def _add(
        self, kernel: Kernel, operands: Sequence[Operand], dim: str, *, per: int = 1, times: int = 1,
    ) -> None:  # fmt: skip
        launch = Launch(self._kernel(kernel), tuple(operands), dim, per, times, head=dim == "logit_rows")
        self.launches.append(launch)

    @property
    def kernels(self) -> list[Kernel]:
        """Every distinct kernel."""
        return list(self._kernels.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed matrices."""
        matrices = {o for launch in self.launches for o in launch.operands if isinstance(o, Matrix)}
        return sum(matrix.bytes(self.numbers) for matrix in matrices)

    @property
    def page_bytes(self) -> int:
        """Bytes of a KV page, in all layers."""
        return self.layers * self.limits.page_size * self.heads.token_bytes(self.numbers)

    @property
    def attention_context(self) -> float:
        """Tokens of context with which a token's attention takes as long as its linear layers.

        Both are bound by arithmetic, and products of integers are some four times as fast.
        """
        linear = [launch.kernel for launch in self.launches if isinstance(launch.kernel, Gemm) and not launch.head]
        work = sum(kernel.k * kernel.n / (1 if kernel.integers is None else 4) for kernel in linear)
        return work / (2 * self.layers * self.heads.query * self.heads.dim)

    # Launches

    def embed(
        self, tensor: str, vocab_size: int, hidden: int, head: Linear, positions: tuple[str, int] | None = None
    ) -> Buffer:
        """The hidden state from token ids, plus learned embeddings of the position (tensor, rows) if there are any.

        A tensor that is that of the `head` too is packed once, for both.
        """
        self.vocab_size, self.hidden_size = vocab_size, hidden
        if hidden % 16:
            raise ModelError(f"hidden_size is {hidden}; it must be a multiple of 16")
        out = self._floats("hidden", hidden)
        integers = self.quantization.format_of(head) if head.tensors[0][0] == tensor else None
        matrix = Matrix((Part(tensor, vocab_size, hidden),), vocab_size, hidden, integers)
        operands: list[Operand] = [Buffer("token_ids", input=True), matrix, out]
        if positions is not None:
            operands += [Buffer("positions", input=True), Rows(*positions, hidden)]
        self._add(Embedding("embed", hidden, positions is not None, integers), operands, "tokens")
        return out

    def norm(
        self, hidden: Buffer, width: int, weight: str, epsilon: float, feeds: Linear, *, bias: str = "",
        mean: bool = False,
    ) -> Activations:  # fmt: skip
        """RMSNorm (LayerNorm if `mean`) of the hidden state, in the format that the layer it `feeds` reads if it can.

        Before the head it takes only the rows whose logits are wanted; and there, in f32, the hidden states that an
        embedding pools can be had.
        """
        in_order = self.quantization.order_of(feeds, width) is None
        integers = self.quantization.format_of(feeds) if in_order else None
        out = self._activations("normed", width) if integers is None else self._integers(width, integers)
        operands: list[Operand] = [hidden, Vector((weight,), (width,)), out.buffer]
        if bias:
            operands.append(Vector((bias,), (width,)))
        if feeds.head:
            operands.append(Buffer("logit_rows", input=True))
        kernel = Norm("norm", width, epsilon, mean=mean, bias=bool(bias), gather=feeds.head, integers=integers)
        self._add(kernel, operands, _dim_of(feeds))
        if feeds.head:
            plain = self._kernel(replace(kernel, name="norm_states", integers=None, plain=True))
            operands[2] = Buffer("hidden_states", input=True)
            self.states.append(Launch(plain, tuple(operands), _dim_of(feeds)))
        return out

    def _quantized(self, x: Activations, linear: Linear) -> Activations:
        """x in the format that the linear layer reads."""
        integers = self.quantization.format_of(linear)
        if integers is None or x.integers is not None:
            return x
        out = self._integers(x.columns, integers)
        operands: list[Operand] = [x.buffer, out.buffer]
        order = self.quantization.order_of(linear, x.columns)
        if order is not None:
            operands.append(Table("order", order))
        kernel = Quantize("quantize", x.columns, integers, gather=order is not None)
        self._add(kernel, operands, _dim_of(linear))
        return out

    def _matrix(self, linear: Linear, k: int) -> tuple[Matrix, Vector | None]:
        """The packed tensors of `linear`, one below the other or 16 columns of each in turn, and their biases."""
        sizes = tuple(n for _, _, n in linear.tensors)
        if not linear.interleaved and any(size % TILE_ROWS for size in sizes[:-1]):
            raise ModelError(f"outputs {sizes} of stacked linear layers must be multiples of 16")
        integers = self.quantization.format_of(linear)
        if integers is not None and k > MOST_INTEGER_K:
            raise ModelError(f"{linear.tensors[0][0]} has {k} inputs; integers are supported up to {MOST_INTEGER_K}")
        step = len(sizes) if linear.interleaved else 1
        parts, tile, columns = [], 0, 0
        for weight, _, n in linear.tensors:
            parts.append(Part(weight, n, k, linear.transposed, tile, step))
            tile += 1 if linear.interleaved else -(-n // TILE_ROWS)
            columns += round_up(n, TILE_ROWS) if linear.interleaved else n
        biases = tuple(bias for _, bias, _ in linear.tensors)
        vector = Vector(biases, sizes, linear.interleaved) if linear.bias else None
        return Matrix(tuple(parts), columns, k, integers), vector

    def _gemm(
        self, name: str, x: Activations, matrix: Matrix, out: Buffer, bias: Vector | None = None, *,
        epilogue: str = "store", activation: str = "", dim: str = "tokens",
    ) -> None:  # fmt: skip
        number = Dim[dim].value
        kernel = Gemm(name, x.columns, matrix.n, epilogue, bias is not None, activation, number, matrix.integers)
        operands: list[Operand] = [x.buffer, matrix, out]
        if bias is not None:
            operands.append(bias)
        self._add(kernel, operands, dim, per=ROWS_PER_ITEM, times=round_up(matrix.n, BLOCK) // BLOCK)

    def linear(self, x: Activations, linear: Linear, name: str) -> Buffer:
        """x W^T + b as f32 rows."""
        x = self._quantized(x, linear)
        matrix, bias = self._matrix(linear, x.columns)
        out = self._floats(name, matrix.n)
        self._gemm("linear", x, matrix, out, bias)
        return out

    def add_linear(self, hidden: Buffer, x: Activations, linear: Linear) -> None:
        """hidden += x W^T + b."""
        x = self._quantized(x, linear)
        matrix, bias = self._matrix(linear, x.columns)
        self._gemm("linear_add", x, matrix, hidden, bias, epilogue="add")

    def activated(self, x: Activations, linear: Linear, activation: str) -> Activations:
        """act(x W^T + b)."""
        x = self._quantized(x, linear)
        matrix, bias = self._matrix(linear, x.columns)
        out = self._activations("intermediate", matrix.n)
        self._gemm("linear_act", x, matrix, out.buffer, bias, epilogue="activation", activation=activation)
        return out

    def gated(self, x: Activations, gate_and_up: Linear, activation: str) -> Activations:
        """act(x G^T) * (x U^T), of two interleaved tensors."""
        x = self._quantized(x, gate_and_up)
        matrix, bias = self._matrix(gate_and_up, x.columns)
        out = self._activations("intermediate", gate_and_up.tensors[0][2])
        self._gemm("linear_gate", x, matrix, out.buffer, bias, epilogue="gate", activation=activation)
        return out

    def attention(
        self, qkv: Buffer, layer: int, heads: Heads, *, rope: Rope | None = None, window: int = 0,
        norms: tuple[str, str, float] | None = None, scale: float | None = None,
    ) -> Activations:  # fmt: skip
        """Causal attention over the sequence's pages; writes this step's K and V first.

        `norms`: the RMSNorms of query and key heads (weight, weight, epsilon). `window`: tokens that each attends to.
        """
        if heads.dim % 16 or heads.query % heads.kv:
            raise ModelError(
                f"config.json: num_attention_heads ({heads.query}) must be a multiple of num_key_value_heads "
                f"({heads.kv}), and head_dim ({heads.dim}) a multiple of 16"
            )
        self.heads, self.layers = heads, max(self.layers, layer + 1)
        query_rows = self.limits.capacity * heads.query + TILE_ROWS  # AMX reads whole tiles of rows
        queries = self._buffer("queries", query_rows * heads.query_bytes(self.numbers))
        operands: list[Operand] = [
            qkv, Buffer("positions", input=True), Buffer("kv_slots", input=True), queries, KvLayer(layer),
        ]  # fmt: skip
        if rope is not None:
            operands.append(self._rope_table(rope))
        if norms is not None:
            operands += [Vector((name,), (heads.dim,)) for name in norms[:2]]
        split = SplitHeads("split_heads", heads, rope is not None, norms is not None, norms[2] if norms else 0)
        self._add(split, operands, "tokens", times=heads.kv)
        out = self._activations("attended", heads.query * heads.dim)
        kernel = Attention(
            "attention", heads, scale or 1.0 / math.sqrt(heads.dim), self.limits.page_size // 32,
            window if window < self.limits.max_model_len else 0,
        )  # fmt: skip
        read = (queries, KvLayer(layer))
        self._add(kernel, [Buffer("entries", input=True), *read, out.buffer], "entries", times=heads.kv)
        if self.limits.max_model_len > BLOCK_TOKENS:
            partials = self._buffer("partials", MAX_KV_SPLITS * heads.query * partial_bytes(heads))
            kernel = replace(kernel, name="attention_part", partial=True)
            self._add(kernel, [Buffer("kv_splits", input=True), *read, partials], "kv_splits", times=heads.kv)
            fold = AttentionFold("attention_fold", heads)
            self._add(fold, [Buffer("reductions", input=True), partials, out.buffer], "reductions", times=heads.kv)
        return out

    def _rope_table(self, rope: Rope) -> Table:
        if rope not in self._tables:
            self._tables[rope] = Table("rope", rope.table(self.limits.max_model_len))
        return self._tables[rope]

    def logits(self, normed: Activations, head: Linear) -> None:
        """The logits of the wanted rows."""
        x = self._quantized(normed, head)
        matrix, _ = self._matrix(head, x.columns)
        self._gemm("logits", x, matrix, Buffer("logits", input=True), dim=_dim_of(head))


def _dim_of(linear: Linear) -> str:
    """The dim that holds the rows of a linear layer's input."""
    return "logit_rows" if linear.head else "tokens"
