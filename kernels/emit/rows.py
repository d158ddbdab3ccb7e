"""Kernels whose work item is one row (token): embedding, norms, and what stands between QKV and attention."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.builder import Builder
from quire.kernels.emit.layout import (
    BLOCK,
    PAIRS,
    TILE_ROWS,
    Numbers,
    load_packed_pair,
    round_up,
    store_activation,
    tiled_offset,
)
from quire.kernels.emit.math import rsqrt
from quire.kernels.emit.value import I32, VF32, Value


@dataclass(frozen=True)
class Embedding:
    """Gathers rows of the packed embedding matrix into the f32 hidden state, plus position embeddings if `positions`.

    Buffers: token ids (i32), matrix (packed [vocabulary, hidden]), hidden f32 [m, hidden rounded up to 32], and with
    `positions` the positions (i32) and their table f32 [max, hidden].
    """

    name: str
    hidden: int
    positions: bool = False

    def emit(self, numbers: Numbers) -> str:
        """The kernel as MLIR text."""
        b = Builder(self.name)
        ids, matrix, out = b.buffer(0), b.buffer(1), b.buffer(2)
        blocks = round_up(self.hidden, BLOCK) // BLOCK
        lane_bytes = 4  # bf16: one (even, odd) pair; f32: one element, its partner 64 bytes on
        with b.items() as row:
            token = b.convert("arith.extui", b.load(ids, row * 4, I32), "i64")
            column = b.address(matrix, token // BLOCK * (blocks * numbers.block_bytes))
            offset = token % BLOCK // TILE_ROWS * numbers.tile_bytes + token % TILE_ROWS * lane_bytes
            target = b.address(out, row * (blocks * BLOCK * 4))
            with b.loop(0, blocks) as block, b.loop(0, PAIRS) as pair:
                source = b.address(column, block.index * numbers.block_bytes)
                at = b.address(target, (block.index * PAIRS + pair.index) * 8)
                for i, value in enumerate(load_packed_pair(b, numbers, source, offset, pair.index)):
                    b.store(value, at, 4 * i)
            if self.positions:
                self._add_position(b, target, row)
        return b.text()

    def _add_position(self, b: Builder, target: Value, row: Value) -> None:
        position = b.convert("arith.extui", b.load(b.buffer(3), row * 4, I32), "i64")
        table = b.address(b.buffer(4), position * (self.hidden * 4))
        with b.loop(0, self.hidden // 16) as part:
            at = part.index * 64
            b.store(b.load(target, at, VF32, 64) + b.load(table, at, VF32, 4), target, at, 64)


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm when `mean` is subtracted, from the f32 hidden state to tiled activations.

    Buffers: hidden f32 [m, width rounded up to 32], weight f32 [width], out, then the bias f32 when `bias`, then row
    numbers (i32) when `gather`: item i reads the hidden row that they name. Sums run in 16 lanes, folded 8, 4, 2, 1.
    """

    name: str
    width: int
    epsilon: float
    mean: bool = False
    bias: bool = False
    gather: bool = False

    def emit(self, numbers: Numbers) -> str:
        """The kernel as MLIR text."""
        b = Builder(self.name)
        hidden, weight, out = b.buffer(0), b.buffer(1), b.buffer(2)
        bias = b.buffer(3) if self.bias else None
        with b.items() as item:
            row = item
            if self.gather:
                number = b.load(b.buffer(4 if self.bias else 3), item * 4, I32)
                row = b.convert("arith.extui", number, "i64")
            x = b.address(hidden, row * (round_up(self.width, BLOCK) * 4))
            center = b.broadcast(self._sum(b, x, None) / float(self.width)) if self.mean else None
            variance = self._sum(b, x, center, square=True) / float(self.width)
            scale = b.broadcast(rsqrt(b, variance + self.epsilon))
            with b.loop(0, self.width // 16) as part:
                at = part.index * 64
                value = b.load(x, at, VF32, 64)
                value = value - center if center is not None else value
                value = value * scale * b.load(weight, at, VF32, 64)
                if bias is not None:
                    value = value + b.load(bias, at, VF32, 64)
                store_activation(b, numbers, value, out, tiled_offset(numbers, self.width, item, part.index * 16))
        return b.text()

    def _sum(self, b: Builder, x: Value, center: Value | None, square: bool = False) -> Value:
        with b.loop(0, self.width // 16, state=[b.constant(0.0, VF32)]) as part:
            value = b.load(x, part.index * 64, VF32, 64)
            value = value - center if center is not None else value
            total = part.state[0]
            part.carry(b.fma(value, value, total) if square else total + value)
        return b.fold_lanes(part.results[0], lambda left, right: left + right)
