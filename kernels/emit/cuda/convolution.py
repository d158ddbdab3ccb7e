"""Convolutions by a block of threads: see ConvolutionKernel. Tokens do not depend on each other, so several are
computed at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels._native import StateEntry, StateWrite
from quire.kernels.emit.builder import I64, LANES, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.convolution import CHANNELS_PER_ITEM, ConvolutionKernel
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.emit.math import activation
from quire.kernels.emit.state_entries import EntryStates

TOKENS = 4
"""Tokens in a row that a half-warp computes together, whose inputs overlap."""

_PARTS = CHANNELS_PER_ITEM // LANES


@dataclass(frozen=True)
class _Channels:
    """16 channels of an entry, at offset `at`: its first row and the one after its last, and its states."""

    states: EntryStates
    at: Value
    row: Value
    stop: Value


@dataclass(frozen=True)
class BlockConvolutionKernel(ConvolutionKernel):
    """The kernel with half-warps for 16 channels and some tokens each. One of those that have the same channels writes
    their states when all are done, as a record may be read and written."""

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        assert isinstance(b, BlockBuilder)
        entries, writes, rows, state, weight, out = (b.buffer(i) for i in range(6))
        blocks, width = -(-self.channels // CHANNELS_PER_ITEM), self.channels * 4
        slots = b.teams // _PARTS
        with b.items() as item:
            states = EntryStates.of(b, item // blocks, entries, writes, state)
            first, count = (b.load(states.entry, at, I64) for at in (StateEntry.FIRST, StateEntry.WRITES))
            stop = b.load(writes, (first + count - 1) * StateWrite.BYTES + StateWrite.END, I64)
            channel = item % blocks * CHANNELS_PER_ITEM + b.team % _PARTS * LANES
            some = _Channels(states, channel * 4, b.load(states.entry, StateEntry.ROW, I64), stop)
            slot, is_there = b.team // _PARTS, channel < self.channels
            with b.when(is_there), b.by_team():
                weights = [b.load(weight, some.at + tap * width, VF32, 64) for tap in range(self.taps)]
                bias = b.load(b.buffer(6), some.at, VF32, 64) if self.bias else b.constant(0.0, VF32)
                with b.loop(some.row + slot * TOKENS, some.stop, slots * TOKENS) as run:
                    self._compute(b, some, rows, out, run.index, weights, bias)
            b.barrier()
            with b.when(is_there & b.compare("eq", slot, 0)), b.by_team():
                past = [states.load(b, some.at + tap * width) for tap in range(self.taps - 1)]
                with b.loop(first, first + count) as write:
                    self._write(b, some, rows, past, b.address(writes, write.index * StateWrite.BYTES))

    def _compute(
        self, b: Builder, some: _Channels, rows: Value, out: Value, first: Value, weights: Sequence[Value], bias: Value
    ) -> None:
        """Store the outputs of rows from `first` on."""
        inputs = [self._input_at(b, some, rows, first, i) for i in range(1 - self.taps, TOKENS)]
        for number in range(TOKENS):
            total, row = bias, first + number
            for value, factor in zip(inputs[number:], weights, strict=False):
                total = b.fma(value, factor, total)
            total = activation(b, self.activation, total) if self.activation else total
            if self.gated:
                total = total * b.load(
                    self._row(b, rows, row.min(some.stop - 1)), some.at + self.channels * 4, VF32, 64
                )
            with b.when(row < some.stop):
                b.store(total, out, row * (round_up(self.channels, BLOCK) * 4) + some.at, 64)

    def _input_at(self, b: Builder, some: _Channels, rows: Value, first: Value, after: int) -> Value:
        """Return the input of the row `after` a first one, from the state if it is before the entry's rows."""
        row = first + after
        value = self._input(b, self._row(b, rows, row.max(some.row).min(some.stop - 1)), some.at)
        if after >= 0:
            return value
        tap = (row - some.row + (self.taps - 1)).min(self.taps - 2)
        return b.select(
            b.compare("slt", row, some.row), some.states.load(b, some.at + tap * (self.channels * 4)), value
        )

    def _write(self, b: Builder, some: _Channels, rows: Value, past: Sequence[Value], write: Value) -> None:
        """Store the state after some rows, the inputs of the last ones of them, if there is a record for it."""
        end, record = b.load(write, StateWrite.END, I64), b.load(write, StateWrite.RECORD, I64)
        values = []
        for tap in range(self.taps - 1):
            row = end - (self.taps - 1) + tap
            value = self._input(b, self._row(b, rows, row.max(some.row)), some.at)
            for number in range(tap, self.taps - 1):
                value = b.select(b.compare("eq", row - some.row, number - (self.taps - 1)), past[number], value)
            values.append(value)
        with b.when(record >= 0):
            for tap, value in enumerate(values):
                b.store(value, b.address(some.states.layer, record), some.at + tap * (self.channels * 4), 64)

    def _row(self, b: Builder, rows: Value, row: Value) -> Value:
        """Return the address of what the convolution reads of a row."""
        return b.address(rows, row * (round_up(self.columns, BLOCK) * 4) + self.first * 4)
