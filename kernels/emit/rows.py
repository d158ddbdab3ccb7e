"""Kernels whose work item is one row (token): norms and quantization of activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.kernels.emit.builder import F32, I32, VF32, VI32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import (
    BLOCK,
    TILE_ROWS,
    Dtypes,
    QuantizedFormat,
    load_activation,
    packed_offset,
    round_up,
    store_activation,
)
from quire.kernels.emit.math import int8_scale, magnitude_bits, nearest_int8, rsqrt
from quire.kernels.emit.rotation import rotate_group, whole_groups

_MINUS_INFINITY = -0x800000  # bits of an f32


@dataclass(frozen=True)
class NormKernel(Kernel):
    """RMSNorm, or LayerNorm if `kind` is `layer`, of f32 rows; `none` only converts them.

    Buffers: x f32 [m, width rounded up to 32], or the first `width` of `row_columns` columns, the weight f32 [width]
    unless `kind` is `none`, out, the bias f32 if `bias`, and if `gather` row numbers (i32): item i then reads the row
    of x that number i names. Sums run in 16 lanes, reduced 8, 4, 2, 1.

    `output`: `activations` are packed, and quantized for weights of the format `quantized`; `rows` are f32
    [m, width]; `hidden` is f32 [m, width rounded up to 32], which may be x; `residual` adds `scale` times the norm to
    such rows, and multiplies the sum by `sum_scale`, and with `scalar` by the f32 in the last buffer. With
    `with_floats`, quantized activations are stored as packed floats too, in the last buffer.
    """

    width: int
    epsilon: float
    kind: Literal["rms", "layer", "none"] = "rms"
    bias: bool = False
    gather: bool = False
    quantized: QuantizedFormat | None = None
    output: Literal["activations", "rows", "hidden", "residual"] = "activations"
    scale: float = 1.0
    row_columns: int = 0
    scalar: bool = False
    with_floats: bool = False
    sum_scale: float = 1.0

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        numbers = iter(range(6))
        source = b.buffer(next(numbers))
        weight = b.buffer(next(numbers)) if self.kind != "none" else None
        out = b.buffer(next(numbers))
        bias = b.buffer(next(numbers)) if self.bias else None
        scratch = b.scratch(round_up(self.width, BLOCK) * 4) if self.quantized is not None else None
        with b.items() as item:
            row = item
            if self.gather:
                row = b.convert("arith.extui", b.load(b.buffer(next(numbers)), item * 4, I32), "i64")
            scalar = b.broadcast(b.load(b.buffer(next(numbers)), 0, F32)) if self.scalar else None
            floats = b.buffer(next(numbers)) if self.with_floats else None
            store = self._store(b, context.dtypes, out, item, scratch, scalar)
            x = b.address(source, row * (round_up(self.row_columns or self.width, BLOCK) * 4))
            if self.kind != "none":
                x = b.staged(x, self.width // 16 * 64, scratch)
            center = b.broadcast(self._sum(b, x, None) / float(self.width)) if self.kind == "layer" else None
            factor = None if self.kind == "none" else b.broadcast(self._inverse_deviation(b, x, center))
            with b.each(0, self.width // 16) as part:
                at = part.index * 64
                value = b.load(x, at, VF32, 64)
                value = value - center if center is not None else value
                if factor is not None and weight is not None:
                    value = value * factor * b.load(weight, at, VF32, 64)
                if bias is not None:
                    value = value + b.load(bias, at, VF32, 64)
                store(part.index, at, value)
                if floats is not None:
                    place = packed_offset(context.dtypes, self.width, item, part.index * 16)
                    store_activation(b, context.dtypes, value, floats, place)
            if self.quantized is not None and scratch is not None:
                _store_quantized(
                    b, self.quantized, self.width, out, item, lambda part: b.load(scratch, part * 64, VF32, 64)
                )

    def _store(
        self, b: Builder, dtypes: Dtypes, out: Value, item: Value, scratch: Value | None, scalar: Value | None
    ) -> Callable[[Value, Value, Value], None]:
        """Return a function that emits the store of columns 16 i .. 16 i + 15, given i, their offset and value."""
        if self.output == "residual":
            hidden = b.address(out, item * (round_up(self.width, BLOCK) * 4))

            def add(_: Value, at: Value, value: Value) -> None:
                total = b.load(hidden, at, VF32, 64) + value * self.scale
                total = total if self.sum_scale == 1 else total * self.sum_scale
                b.store(total if scalar is None else total * scalar, hidden, at, 64)

            return add
        target = scratch
        if self.output in ("rows", "hidden"):
            target = b.address(out, item * ((self.width if self.output == "rows" else round_up(self.width, BLOCK)) * 4))
        if target is not None:
            return lambda _, at, value: b.store(value, target, at, 64)
        return lambda part, _, value: store_activation(
            b, dtypes, value, out, packed_offset(dtypes, self.width, item, part * 16)
        )

    def _inverse_deviation(self, b: Builder, x: Value, center: Value | None) -> Value:
        return rsqrt(b, self._sum(b, x, center, square=True) / float(self.width) + self.epsilon)

    def _sum(self, b: Builder, x: Value, center: Value | None, square: bool = False) -> Value:
        with b.loop(0, self.width // 16, state=[b.constant(0.0, VF32)]) as part:
            value = b.load(x, part.index * 64, VF32, 64)
            value = value - center if center is not None else value
            total = part.state[0]
            part.carry(b.fma(value, value, total) if square else total + value)
        return b.fold_lanes(part.results[0], lambda left, right: left + right)


@dataclass(frozen=True)
class SpreadKernel(Kernel):
    """Spreads rows of `outputs` logits over a vocabulary, whose other tokens get -inf.

    Buffers: logits f32 [m, outputs rounded up to 32], the token of each output (i32), and f32 [m, vocabulary rounded up
    to 32].
    """

    outputs: int
    vocabulary: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        logits, tokens, out = b.buffer(0), b.buffer(1), b.buffer(2)
        with b.items() as row:
            source = b.address(logits, row * (round_up(self.outputs, BLOCK) * 4))
            target = b.address(out, row * (round_up(self.vocabulary, BLOCK) * 4))
            with b.each(0, round_up(self.vocabulary, BLOCK) // 16) as part:
                b.store(b.constant(_MINUS_INFINITY, VI32).bitcast(F32), target, part.index * 64, 64)
            with b.each_scalar(0, self.outputs) as output:
                token = b.convert("arith.extui", b.load(tokens, output.index * 4, I32), "i64")
                b.store(b.load(source, output.index * 4, F32), target, token * 4)


@dataclass(frozen=True)
class QuantizeKernel(Kernel):
    """Quantizes packed activations of `width` columns for weights of the format `quantized`.

    Buffers: x, out, if `gather` the i32 columns of x to take, in order [width], and unless `rows` is `same` the slots
    of emit/experts.py. With these, work items are assignments: each quantizes its grouped row (`slots`), or its token's
    row into the grouped one (`scatter`).
    """

    width: int
    quantized: QuantizedFormat
    gather: bool = False
    rows: Literal["same", "slots", "scatter"] = "same"
    top_k: int = 1

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes = context.dtypes
        x, out = b.buffer(0), b.buffer(1)
        with b.items() as item:
            row = target = item
            if self.rows != "same":
                slots = b.buffer(3 if self.gather else 2)
                target = b.convert("arith.extui", b.load(slots, item * 4, I32), "i64")
                row = target if self.rows == "slots" else item // self.top_k

            def load(part: Value) -> Value:
                if not self.gather:
                    return load_activation(b, dtypes, x, packed_offset(dtypes, self.width, row, part * 16))
                b.store(b.constant(0.0, VF32), gathered, 0, 64)
                with b.loop(0, (b.index(self.width) - part * 16).min(16)) as lane:
                    column = b.load(b.buffer(2), (part * 16 + lane.index) * 4, I32)
                    at = packed_offset(dtypes, self.width, row, b.convert("arith.extui", column, "i64"))
                    b.store(load_activation(b, dtypes, x, at, lanes=1), gathered, lane.index * 4)
                return b.load(gathered, 0, VF32, 64)

            gathered = b.own_scratch(64)
            _store_quantized(b, self.quantized, self.width, out, target, load)


def _store_quantized(
    b: Builder, quantized: QuantizedFormat, width: int, out: Value, row: Value, load: Callable[[Value], Value]
) -> None:
    """Quantize a row, of which `load(i)` gives the columns 16 i .. 16 i + 15.

    Each group gets the scale max |x| / 127, x / scale rounded to nearest even, and the sum of that, with groups of 32
    also that of the first half. The maximum is taken of the bits, so that a NaN becomes the scale.
    """
    span = quantized.activation_group or quantized.span(width)
    groups, parts = quantized.activation_groups(width), -(-width // 16)
    target = _QuantizedRow(b, quantized, width, out, row)
    if not quantized.rotated:
        with b.each(0, groups) as group:
            first = group.index * (span // 16)
            target.store(group.index, first, (first + span // 16).min(parts), load)
        return
    rotated = b.own_scratch(span * 4)
    for first_group, stop, count in whole_groups(parts, span // 16):
        with b.each(first_group, stop) as group:
            rotate_group(b, quantized, group.index, count, load, rotated)
            target.store(
                group.index, b.index(0), b.index(span // 16), lambda part: b.load(rotated, part * 64, VF32, 64)
            )
    if groups > -(-parts // (span // 16)):  # one that only makes their number even
        with b.each(groups - 1, groups) as group:
            target.store(group.index, b.index(0), b.index(0), load)


@dataclass(frozen=True)
class _QuantizedRow:
    """A row of packed quantized activations."""

    b: Builder
    quantized: QuantizedFormat
    width: int
    out: Value
    row: Value

    def store(self, group: Value, first: Value, stop: Value, load: Callable[[Value], Value]) -> None:
        """Quantize a group, whose parts are those that `load` gives from number `first` to before `stop`."""
        b, words = self.b, self.quantized.activation_words
        span = self.quantized.activation_group or self.quantized.span(self.width)
        panel = b.address(self.out, self.row // TILE_ROWS * self.quantized.panel_bytes(self.width))
        place, before = self.row % TILE_ROWS, group * (span // 16) - first
        with b.loop(first, stop, state=[b.constant(0, VI32)]) as part:
            part.carry(magnitude_bits(b, load(part.index)).max(part.state[0]))
        largest = b.fold_lanes(part.results[0], lambda left, right: left.max(right)).bitcast(F32)
        scale, inverse = int8_scale(b, largest)
        factor = b.broadcast(inverse)
        with b.loop(first, stop, state=[b.constant(0, VI32)] * 2) as part:
            values = nearest_int8(b, load(part.index) * factor)
            number = part.index + before
            at = number // 4 * (TILE_ROWS * 64) + place * 64 + number % 4 * 16
            b.store(values, panel, at, 16)
            wide = b.convert("arith.extsi", values, VI32)
            part.carry(part.state[0] + wide, b.select(b.compare("eq", part.index, first), wide, part.state[1]))
        scales = b.address(panel, place * 4 + TILE_ROWS * self.quantized.depth(self.width))
        at = group * (words * TILE_ROWS * 4)
        b.store(scale, scales, at)
        for word, sums in enumerate(part.results[: words - 1], 1):
            b.store(b.fold_lanes(sums, lambda left, right: left + right), scales, at + word * TILE_ROWS * 4)
