"""Gates: what a layer has computed, multiplied by a function of other outputs of its projections."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.builder import VF32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import BLOCK, load_activation, packed_offset, round_up, store_activation
from quire.kernels.emit.math import relu, rsqrt, sigmoid, silu


@dataclass(frozen=True)
class GateKernel(Kernel):
    """Multiplies packed activations of `width` columns by sigmoid(gate), in place.

    Work items are tokens. Buffers: the activations, gates f32 [m, width rounded up to 32].
    """

    width: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes = context.dtypes
        x, gates = b.buffer(0), b.buffer(1)
        with b.items() as row, b.each(0, self.width // 16) as part:
            gate = b.load(gates, row * (round_up(self.width, BLOCK) * 4) + part.index * 64, VF32, 64)
            at = packed_offset(dtypes, self.width, row, part.index * 16)
            store_activation(b, dtypes, load_activation(b, dtypes, x, at) * sigmoid(b, gate), x, at)


@dataclass(frozen=True)
class CutoffKernel(Kernel):
    """Activation sparsity (Gaussian top-k): max(g - mean - cutoff * deviation, 0) in place of each gate g.

    Work items are tokens, of whose gates these are the mean and the standard deviation. Buffers: the gates, f32
    [m, width rounded up to 32]. Sums run in 16 lanes, reduced 8, 4, 2, 1.
    """

    width: int
    cutoff: float

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        with b.items() as row:
            gates = b.address(b.buffer(0), row * (round_up(self.width, BLOCK) * 4))
            x = b.staged(gates, self.width * 4)
            mean = self._mean(b, x, None)
            square = self._mean(b, x, b.broadcast(mean))
            # x - x is NaN where a sum has overflowed, so that the logits are NaN too.
            deviation = b.unary("math.sqrt", square) + (square - square)
            least = b.broadcast(b.fma(deviation, b.constant(self.cutoff, deviation.type), mean))
            with b.each(0, self.width // 16) as part:
                at = part.index * 64
                b.store(relu(b, b.load(x, at, VF32, 64) - least), gates, at, 64)

    def _mean(self, b: Builder, gates: Value, center: Value | None) -> Value:
        """Return the mean of the gates, or of the squares of their distances from `center`."""
        with b.loop(0, self.width // 16, state=[b.constant(0.0, VF32)]) as part:
            value, total = b.load(gates, part.index * 64, VF32, 64), part.state[0]
            distance = value if center is None else value - center
            part.carry(total + value if center is None else b.fma(distance, distance, total))
        return b.fold_lanes(part.results[0], lambda left, right: left + right) / float(self.width)


@dataclass(frozen=True)
class GatedNormKernel(Kernel):
    """RMSNorm of groups of columns, and a gate z: weight * norm(x) * silu(z), or `gate_first` weight * norm(x silu(z)).

    Work items are tokens times groups of `group` columns. Buffers: x f32 [m, width rounded up to 32], rows f32 of
    `gate_columns` columns that have z from column `first` on, out, packed activations of `width` columns, and the
    weight f32 [weights] unless there is no `norm`. With fewer weights than columns these repeat; z is multiplied by
    `scale`. Sums run in 16 lanes, reduced 8, 4, 2, 1.
    """

    width: int
    group: int
    weights: int
    gate_columns: int
    first: int
    epsilon: float
    gate_first: bool = False
    norm: bool = True
    scale: float = 1.0

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes, groups = context.dtypes, self.width // self.group
        rows, gates, out = (b.buffer(i) for i in range(3))
        weight = b.buffer(3) if self.norm else None
        with b.items() as item:
            token, start = item // groups, item % groups * self.group
            x = b.address(rows, token * (round_up(self.width, BLOCK) * 4) + start * 4)
            z = b.address(gates, token * (round_up(self.gate_columns, BLOCK) * 4) + (start + self.first) * 4)
            if weight is not None and self.gate_first:
                with b.each(0, self.group // 16) as part:
                    at = part.index * 64
                    b.store(b.load(x, at, VF32, 64) * self._gate(b, z, at), x, at, 64)
            if weight is not None:
                x = b.staged(x, self.group * 4)
            factor = None if weight is None else self._inverse_rms(b, x)
            with b.each(0, self.group // 16) as part:
                at, column = part.index * 64, start + part.index * 16
                value = b.load(x, at, VF32, 64)
                if weight is not None and factor is not None:
                    value = value * factor * b.load(weight, column % self.weights * 4, VF32, 64)
                if weight is None or not self.gate_first:
                    value = value * self._gate(b, z, at)
                store_activation(b, dtypes, value, out, packed_offset(dtypes, self.width, token, column))

    def _gate(self, b: Builder, z: Value, at: Value) -> Value:
        value = b.load(z, at, VF32, 64)
        return silu(b, value if self.scale == 1 else value * self.scale)

    def _inverse_rms(self, b: Builder, x: Value) -> Value:
        with b.loop(0, self.group // 16, state=[b.constant(0.0, VF32)]) as part:
            value = b.load(x, part.index * 64, VF32, 64)
            part.carry(b.fma(value, value, part.state[0]))
        total = b.fold_lanes(part.results[0], lambda left, right: left + right)
        return b.broadcast(rsqrt(b, total / float(self.group) + self.epsilon))
