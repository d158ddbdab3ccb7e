"""Causal convolutions, whose state is the last inputs of each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import VF32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.emit.math import activation
from quire.kernels.emit.state_entries import EntryStates

CHANNELS_PER_ITEM = 64
"""Channels of a work item."""


@dataclass(frozen=True)
class ConvolutionKernel(Kernel):
    """y[t, c] = activation(bias[c] + sum_i weight[i, c] x[t - taps + 1 + i, c]), in order of i, by FMA.

    Work items are state entries times blocks of channels. Buffers: state entries, their writes, rows f32 that have x
    from column `first` of `columns` on, the layer's state f32 [taps - 1, channels], weight f32 [taps, channels], y f32
    [m, channels rounded up to 32], and the bias f32 if `bias`.

    `gated`: x is the product of columns c and 2 channels + c of the rows, and y is multiplied by column channels + c.
    """

    channels: int
    taps: int
    columns: int
    first: int = 0
    activation: str = ""
    bias: bool = False
    gated: bool = False

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        entries, writes, rows, state, weight, out = (b.buffer(i) for i in range(6))
        bias = b.buffer(6) if self.bias else None
        blocks, width = -(-self.channels // CHANNELS_PER_ITEM), self.channels * 4
        with b.items() as item:
            states = EntryStates.of(b, item // blocks, entries, writes, state)
            first = item % blocks * CHANNELS_PER_ITEM
            stop = (first + CHANNELS_PER_ITEM).min(self.channels)
            with b.loop(first // 16, stop // 16) as lanes:
                at = lanes.index * 64
                weights = [b.load(weight, at + tap * width, VF32, 64) for tap in range(self.taps)]
                start = b.constant(0.0, VF32) if bias is None else b.load(bias, at, VF32, 64)
                past = [states.load(b, at + tap * width) for tap in range(self.taps - 1)]

                def store(record: Value, past: Sequence[Value], at: Value = at) -> None:
                    for tap, value in enumerate(past):
                        b.store(value, record, at + tap * width, 64)

                with states.tokens(b, past, store) as token:
                    x = b.address(rows, token.index * (round_up(self.columns, BLOCK) * 4) + self.first * 4)
                    inputs = [*token.state, self._input(b, x, at)]
                    total = start
                    for value, factor in zip(inputs, weights, strict=True):
                        total = b.fma(value, factor, total)
                    total = activation(b, self.activation, total) if self.activation else total
                    total = total * b.load(x, at + width, VF32, 64) if self.gated else total
                    b.store(total, out, token.index * (round_up(self.channels, BLOCK) * 4) + at, 64)
                    token.carry(*inputs[1:])

    def _input(self, b: Builder, row: Value, at: Value) -> Value:
        value = b.load(row, at, VF32, 64)
        return value * b.load(row, at + 2 * self.channels * 4, VF32, 64) if self.gated else value
