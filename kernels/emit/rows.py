"""Kernels whose work item is one row (token): embedding, norms, and what stands between QKV and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels.emit.builder import Builder
from quire.kernels.emit.layout import (
    BLOCK,
    PAIRS,
    TILE_ROWS,
    IntegerFormat,
    Numbers,
    load_activation,
    load_packed_pair,
    round_up,
    store_activation,
    tiled_offset,
)
from quire.kernels.emit.math import int8_scale, magnitude_bits, nearest_int8, rsqrt
from quire.kernels.emit.value import F16, F32, I8, I32, VF32, VI32, Value, vector


@dataclass(frozen=True)
class Embedding:
    """Gathers rows of the packed embedding matrix into the f32 hidden state, plus position embeddings if `positions`.

    Buffers: token ids (i32), matrix (packed [vocabulary, hidden]), hidden f32 [m, hidden rounded up to 32], and with
    `positions` the positions (i32) and their table f32 [max, hidden]. `integers` is the matrix's format, None for
    floats; it has no zero points.
    """

    name: str
    hidden: int
    positions: bool = False
    integers: IntegerFormat | None = None

    def emit(self, numbers: Numbers) -> str:
        """The kernel as MLIR text."""
        b = Builder(self.name)
        ids, matrix, out = b.buffer(0), b.buffer(1), b.buffer(2)
        with b.items() as row:
            token = b.convert("arith.extui", b.load(ids, row * 4, I32), "i64")
            target = b.address(out, row * (round_up(self.hidden, BLOCK) * 4))
            if self.integers is not None:
                self._gather_integers(b, self.integers, matrix, token, target)
            else:
                self._gather_floats(b, numbers, matrix, token, target)
            if self.positions:
                self._add_position(b, target, row)
        return b.text()

    def _gather_floats(self, b: Builder, numbers: Numbers, matrix: Value, token: Value, target: Value) -> None:
        blocks = round_up(self.hidden, BLOCK) // BLOCK
        lane_bytes = 4  # bf16: one (even, odd) pair; f32: one element, its partner 64 bytes on
        column = b.address(matrix, token // BLOCK * (blocks * numbers.block_bytes))
        offset = token % BLOCK // TILE_ROWS * numbers.tile_bytes + token % TILE_ROWS * lane_bytes
        with b.loop(0, blocks) as block, b.loop(0, PAIRS) as pair:
            source = b.address(column, block.index * numbers.block_bytes)
            at = b.address(target, (block.index * PAIRS + pair.index) * 8)
            for i, value in enumerate(load_packed_pair(b, numbers, source, offset, pair.index)):
                b.store(value, at, 4 * i)

    def _gather_integers(self, b: Builder, integers: IntegerFormat, matrix: Value, token: Value, target: Value) -> None:
        block, column = b.address(matrix, token // BLOCK * integers.block_bytes(self.hidden)), token % BLOCK
        depth, span = integers.line_depth, integers.span(self.hidden)
        with b.loop(0, integers.groups(self.hidden)) as group:
            header = b.address(block, group.index * integers.group_bytes(self.hidden))
            if integers.group:
                scale = b.convert("arith.extf", b.load(header, column * 2, F16), F32)
            else:
                scale = b.load(header, column * 4, F32)
            factor = b.broadcast(scale, 4)
            lines = b.address(header, column * 4 + integers.header_bytes)
            first = group.index * (span // depth)
            stop = (first + span // depth).min(self.hidden // depth)
            with b.loop(first, stop) as line:
                bytes_ = b.load(lines, (line.index - first) * 128, vector(I8, 4))
                word = b.convert("arith.extui", bytes_, vector(I32, 4))
                for i, values in enumerate([word] if integers.bits == 8 else [word & 15, word >> 4]):
                    floats = b.convert("arith.sitofp", values - integers.middle, vector(F32, 4))
                    b.store(floats * factor, target, line.index * (4 * depth) + 16 * i, 4)

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
    `integers`: the activations are quantized for weights of that format. `plain`: out is f32 [m, width] instead.
    """

    name: str
    width: int
    epsilon: float
    mean: bool = False
    bias: bool = False
    gather: bool = False
    integers: IntegerFormat | None = None
    plain: bool = False

    def emit(self, numbers: Numbers) -> str:
        """The kernel as MLIR text."""
        b = Builder(self.name)
        hidden, weight, out = b.buffer(0), b.buffer(1), b.buffer(2)
        bias = b.buffer(3) if self.bias else None
        normed = b.scratch(round_up(self.width, BLOCK) * 4) if self.integers is not None else None
        with b.items() as item:
            if self.plain:
                normed = b.address(out, item * (self.width * 4))
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
                if normed is None:
                    store_activation(b, numbers, value, out, tiled_offset(numbers, self.width, item, part.index * 16))
                else:
                    b.store(value, normed, at, 64)
            if self.integers is not None and normed is not None:
                _store_integers(
                    b, self.integers, self.width, out, item, lambda part: b.load(normed, part * 64, VF32, 64)
                )
        return b.text()

    def _sum(self, b: Builder, x: Value, center: Value | None, square: bool = False) -> Value:
        with b.loop(0, self.width // 16, state=[b.constant(0.0, VF32)]) as part:
            value = b.load(x, part.index * 64, VF32, 64)
            value = value - center if center is not None else value
            total = part.state[0]
            part.carry(b.fma(value, value, total) if square else total + value)
        return b.fold_lanes(part.results[0], lambda left, right: left + right)


@dataclass(frozen=True)
class Quantize:
    """Tiled activations of `width` columns to quantized ones, for weights of the format `integers`.

    Buffers: x, out, then with `gather` the i32 columns of x to take, in order [width].
    """

    name: str
    width: int
    integers: IntegerFormat
    gather: bool = False

    def emit(self, numbers: Numbers) -> str:
        """The kernel as MLIR text."""
        b = Builder(self.name)
        x, out = b.buffer(0), b.buffer(1)
        with b.items() as row:

            def load(part: Value) -> Value:
                if not self.gather:
                    return load_activation(b, numbers, x, tiled_offset(numbers, self.width, row, part * 16))
                b.store(b.constant(0.0, VF32), gathered, 0, 64)
                with b.loop(0, (b.index(self.width) - part * 16).min(16)) as lane:
                    column = b.load(b.buffer(2), (part * 16 + lane.index) * 4, I32)
                    at = tiled_offset(numbers, self.width, row, b.convert("arith.extui", column, "i64"))
                    b.store(load_activation(b, numbers, x, at, lanes=1), gathered, lane.index * 4)
                return b.load(gathered, 0, VF32, 64)

            gathered = b.scratch(64)
            _store_integers(b, self.integers, self.width, out, row, load)
        return b.text()


def _store_integers(
    b: Builder, integers: IntegerFormat, width: int, out: Value, row: Value, load: Callable[[Value], Value]
) -> None:
    """Quantizes a row, of which `load(i)` gives the columns 16 i .. 16 i + 15: for each group the scale max |x| / 127,
    x / scale rounded to nearest even, and the sum of that.

    The maximum is taken of the bits, so that a NaN becomes the scale.
    """
    panel = b.address(out, row // TILE_ROWS * integers.panel_bytes(width))
    place = row % TILE_ROWS
    scales = b.address(panel, place * 4 + TILE_ROWS * integers.depth(width))
    parts = -(-width // 16)
    span = integers.span(width)
    with b.loop(0, integers.groups(width)) as group:
        first = group.index * (span // 16)
        stop = (first + span // 16).min(parts)
        with b.loop(first, stop, state=[b.constant(0, VI32)]) as part:
            part.carry(magnitude_bits(b, load(part.index)).max(part.state[0]))
        largest = b.fold_lanes(part.results[0], lambda left, right: left.max(right)).bitcast(F32)
        scale, inverse = int8_scale(b, largest)
        factor = b.broadcast(inverse)
        with b.loop(first, stop, state=[b.constant(0, VI32)]) as part:
            values = nearest_int8(b, load(part.index) * factor)
            at = part.index // 4 * (TILE_ROWS * 64) + place * 64 + part.index % 4 * 16
            b.store(values, panel, at, 16)
            part.carry(part.state[0] + b.convert("arith.extsi", values, VI32))
        at = group.index * (2 * TILE_ROWS * 4)
        b.store(scale, scales, at)
        b.store(b.fold_lanes(part.results[0], lambda left, right: left + right), scales, at + TILE_ROWS * 4)
