"""Plans: what a model computes, as a list of kernel launches over named buffers and weights.

A model file describes itself to a `PlanBuilder`, once, without touching memory; `runner.py` then compiles the
kernels, packs the weights and hands the launches to the native runner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.kernels.emit.attention import Attention
from quire.kernels.emit.gemm import ROWS_PER_ITEM, Gemm
from quire.kernels.emit.kv import Heads, SplitHeads
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, Numbers, round_up
from quire.kernels.emit.rows import Embedding, Norm
from quire.kernels.errors import ModelError
from quire.kernels.operands import (
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

TOKENS, LOGIT_ROWS, CAPACITY = 0, 1, 2
"""Numbers of the dims that kernels read (native `Dim`)."""
_DIM_NAMES = {TOKENS: "tokens", LOGIT_ROWS: "logit_rows"}


@dataclass
class PlanBuilder:
    """Collects a model's launches. Each method adds one kernel and returns the buffer that it fills.

    Buffers are reused between layers by name; activations are tiled (see emit/layout.py), the hidden state is f32.
    """

    numbers: Numbers
    limits: Limits
    launches: list[Launch] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    vocab_size: int = 0
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

    def _activations(self, name: str, columns: int) -> Buffer:
        rows = round_up(self.limits.capacity, TILE_ROWS)
        return self._buffer(name, rows * round_up(columns, BLOCK) * self.numbers.activation_bytes)

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

    # Launches

    def embed(self, tensor: str, vocab_size: int, hidden: int, positions: tuple[str, int] | None = None) -> Buffer:
        """The hidden state from token ids, plus learned embeddings of the position (tensor, rows) if there are any."""
        self.vocab_size = vocab_size
        if hidden % 16:
            raise ModelError(f"hidden_size is {hidden}; it must be a multiple of 16")
        out = self._floats("hidden", hidden)
        matrix = Matrix((Part(tensor, vocab_size, hidden),), vocab_size, hidden)
        operands: list[Operand] = [Buffer("token_ids", input=True), matrix, out]
        if positions is not None:
            operands += [Buffer("positions", input=True), Rows(*positions, hidden)]
        self._add(Embedding("embed", hidden, positions is not None), operands, "tokens")
        return out

    def norm(
        self, hidden: Buffer, width: int, weight: str, epsilon: float, *, bias: str = "", mean: bool = False,
        head: bool = False,
    ) -> Buffer:  # fmt: skip
        """RMSNorm (LayerNorm if `mean`) of the hidden state; `head` takes the rows whose logits are wanted."""
        out = self._activations("normed", width)
        operands: list[Operand] = [hidden, Vector((weight,), (width,)), out]
        if bias:
            operands.append(Vector((bias,), (width,)))
        if head:
            operands.append(Buffer("logit_rows", input=True))
        kernel = Norm("norm", width, epsilon, mean=mean, bias=bool(bias), gather=head)
        self._add(kernel, operands, "logit_rows" if head else "tokens")
        return out

    def _gemm(
        self, kernel: Gemm, x: Buffer, matrix: Matrix, out: Buffer, bias: Vector | None, dim: int = TOKENS
    ) -> Buffer:
        operands: list[Operand] = [x, matrix, out]
        if bias is not None:
            operands.append(bias)
        times = round_up(matrix.n, BLOCK) // BLOCK
        self._add(kernel, operands, _DIM_NAMES[dim], per=ROWS_PER_ITEM, times=times)
        return out

    def _stacked(self, linear: Linear, k: int) -> tuple[Matrix, Vector | None]:
        """The tensors of `linear` one below the other."""
        parts, tile = [], 0
        for weight, _, n in linear.tensors:
            parts.append(Part(weight, n, k, linear.transposed, first_tile=tile))
            tile += -(-n // TILE_ROWS)
        sizes = tuple(n for _, _, n in linear.tensors)
        if any(size % TILE_ROWS for size in sizes[:-1]):
            raise ModelError(f"outputs {sizes} of stacked linear layers must be multiples of 16")
        bias = Vector(tuple(b for _, b, _ in linear.tensors), sizes) if linear.bias else None
        return Matrix(tuple(parts), sum(sizes), k), bias

    def linear(self, x: Buffer, k: int, linear: Linear, name: str) -> Buffer:
        """x W^T + b as f32 rows."""
        matrix, bias = self._stacked(linear, k)
        kernel = Gemm("linear", k, matrix.n, "store", bias is not None)
        return self._gemm(kernel, x, matrix, self._floats(name, matrix.n), bias)

    def add_linear(self, hidden: Buffer, x: Buffer, k: int, linear: Linear) -> None:
        """hidden += x W^T + b."""
        matrix, bias = self._stacked(linear, k)
        self._gemm(Gemm("linear_add", k, matrix.n, "add", bias is not None), x, matrix, hidden, bias)

    def activated(self, x: Buffer, k: int, linear: Linear, activation: str) -> Buffer:
        """act(x W^T + b) as activations."""
        matrix, bias = self._stacked(linear, k)
        kernel = Gemm("linear_act", k, matrix.n, "activation", bias is not None, activation)
        return self._gemm(kernel, x, matrix, self._activations("intermediate", matrix.n), bias)

    def gated(self, x: Buffer, k: int, gate: Linear, up: Linear, activation: str) -> Buffer:
        """act(x G^T) * (x U^T) as activations."""
        (gate_weight, gate_bias, n), (up_weight, up_bias, _) = gate.tensors[0], up.tensors[0]
        parts = (
            Part(gate_weight, n, k, first_tile=0, tile_step=2),
            Part(up_weight, n, k, first_tile=1, tile_step=2),
        )
        matrix = Matrix(parts, 2 * round_up(n, TILE_ROWS), k)
        bias = Vector((gate_bias, up_bias), (n, n), interleaved=True) if gate.bias else None
        kernel = Gemm("linear_gate", k, matrix.n, "gate", bias is not None, activation)
        return self._gemm(kernel, x, matrix, self._activations("intermediate", n), bias)

    def attention(
        self, qkv: Buffer, layer: int, heads: Heads, *, rope: Rope | None = None, window: int = 0,
        norms: tuple[str, str, float] | None = None, scale: float | None = None,
    ) -> Buffer:  # fmt: skip
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
        split = SplitHeads(
            "split_heads", heads, CAPACITY, rope is not None, norms is not None, norms[2] if norms else 0
        )
        self._add(split, operands, "tokens")
        out = self._activations("attended", heads.query * heads.dim)
        kernel = Attention(
            "attention", heads, CAPACITY, scale or 1.0 / math.sqrt(heads.dim), self.limits.page_size // 32,
            window if window < self.limits.max_model_len else 0,
        )  # fmt: skip
        self._add(
            kernel,
            [Buffer("entries", input=True), queries, KvLayer(layer), out],
            "entries",
            times=heads.kv,
        )
        return out

    def _rope_table(self, rope: Rope) -> Table:
        if rope not in self._tables:
            self._tables[rope] = Table("rope", rope.table(self.limits.max_model_len))
        return self._tables[rope]

    def logits(self, normed: Buffer, hidden: int, tensor: str) -> None:
        """The logits of the wanted rows. A tied `tensor` is packed once, for the embedding and for this."""
        n = self.vocab_size
        matrix = Matrix((Part(tensor, n, hidden),), n, hidden)
        kernel = Gemm("logits", hidden, n, "store", rows=LOGIT_ROWS)
        self._gemm(kernel, normed, matrix, Buffer("logits", input=True), None, LOGIT_ROWS)
