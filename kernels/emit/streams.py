"""Kernels of models whose tokens have several streams of hidden states (AltUp): see Streams in graph/operations.py.

Work items are tokens. The hidden states and the streams s_0, s_1 ... are f32 [m, width rounded up to 32].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import BLOCK, packed_offset, round_up, store_activation
from quire.kernels.emit.math import rsqrt, tanh

_LEAST_SQUARE = 1e-5  # floor of the mean square, as in transformers


def _factors(b: Builder, rows: Value, row: Value, count: int) -> list[Value]:
    """Return a token's `count` factors of f32 rows as vectors."""
    base = b.address(rows, row * (round_up(count, BLOCK) * 4))
    return [b.broadcast(b.load(base, 4 * i, F32)) for i in range(count)]


def _rows(b: Builder, buffers: Sequence[Value], row: Value, width: int) -> list[Value]:
    """Return the addresses of a token's row in each of the buffers."""
    return [b.address(buffer, row * (round_up(width, BLOCK) * 4)) for buffer in buffers]


@dataclass(frozen=True)
class StreamRouteKernel(Kernel):
    """Packed activations tanh(x) of f32 rows x, a column for each stream, of which there are at most 16.

    Buffers: x f32 [m, streams rounded up to 32], out.
    """

    streams: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes, source, out = context.dtypes, b.buffer(0), b.buffer(1)
        with b.items() as row, b.each(0, 1) as part:
            x = b.load(source, row * (round_up(self.streams, BLOCK) * 4) + part.index * 64, VF32, 64)
            value = b.select(b.compare("slt", b.lane_numbers(), self.streams), tanh(b, x), b.constant(0.0, VF32))
            store_activation(b, dtypes, value, out, packed_offset(dtypes, self.streams, row, part.index * 16))


@dataclass(frozen=True)
class PredictKernel(Kernel):
    """Predict step of AltUp: s_i becomes s_i + the sum of p_ij s_j over j; s_0 are the hidden states.

    Buffers: p f32 [m, streams * streams rounded up to 32], the hidden states, and all streams, of which the first is
    only written.
    """

    width: int
    streams: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        count = self.streams
        coefficients, hidden, *streams = (b.buffer(i) for i in range(2 + count))
        with b.items() as row:
            factors = _factors(b, coefficients, row, count * count)
            target, *stored = _rows(b, (hidden, *streams), row, self.width)
            with b.each(0, self.width // 16) as part:
                at = part.index * 64
                values = [b.load(source, at, VF32, 64) for source in (target, *stored[1:])]
                for i in range(count):
                    total = values[i]
                    for j, value in enumerate(values):
                        total = b.fma(value, factors[i * count + j], total)
                    b.store(total, stored[i], at, 64)
                    if i == 0:
                        b.store(total, target, at, 64)


@dataclass(frozen=True)
class CorrectKernel(Kernel):
    """Correct step of AltUp, after a layer has made x of s_0: s_i becomes s_i + (1 + c_i) (x - s_0).

    Buffers: c f32 [m, streams rounded up to 32], the hidden states, which are x and become s_0, and all streams, of
    which the first is only read. With `scaled` also f32 [width] and rows like the hidden states, which become the
    products of both.
    """

    width: int
    streams: int
    scaled: bool

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        count = self.streams
        coefficients, hidden, *streams = (b.buffer(i) for i in range(2 + count))
        scales, products = (b.buffer(2 + count + i) for i in range(2)) if self.scaled else (None, None)
        with b.items() as row:
            factors = [factor + 1.0 for factor in _factors(b, coefficients, row, count)]
            target, *stored = _rows(b, (hidden, *streams), row, self.width)
            out = None if products is None else _rows(b, (products,), row, self.width)[0]
            with b.each(0, self.width // 16) as part:
                at = part.index * 64
                before = b.load(stored[0], at, VF32, 64)
                change = b.load(target, at, VF32, 64) - before
                for factor, stream in zip(factors[1:], stored[1:], strict=True):
                    b.store(b.fma(change, factor, b.load(stream, at, VF32, 64)), stream, at, 64)
                first = b.fma(change, factors[0], before)
                b.store(first, target, at, 64)
                if scales is not None and out is not None:
                    b.store(first * b.load(scales, at, VF32, 64), out, at, 64)


@dataclass(frozen=True)
class RescaleKernel(Kernel):
    """Scales rows to the root mean squares of others, in place.

    Buffers: the others, the rows. Sums run in 16 lanes, reduced 8, 4, 2, 1.
    """

    width: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        with b.items() as row:
            wanted, rows = _rows(b, (b.buffer(0), b.buffer(1)), row, self.width)
            x = b.staged(rows, self.width * 4)
            least = self._mean_square(b, x).max(_LEAST_SQUARE)
            factor = b.broadcast(b.unary("math.sqrt", self._mean_square(b, wanted)) * rsqrt(b, least))
            with b.each(0, self.width // 16) as part:
                at = part.index * 64
                b.store(b.load(x, at, VF32, 64) * factor, rows, at, 64)

    def _mean_square(self, b: Builder, rows: Value) -> Value:
        with b.loop(0, self.width // 16, state=[b.constant(0.0, VF32)]) as part:
            value = b.load(rows, part.index * 64, VF32, 64)
            part.carry(b.fma(value, value, part.state[0]))
        return b.fold_lanes(part.results[0], lambda left, right: left + right) / float(self.width)
