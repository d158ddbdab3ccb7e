"""Short vectors of rows that have adapters, s = scale * A x + offset: see adapters.py for the order of the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.adapters import ENTRY_BYTES, RowAdapters
from quire.kernels.emit.builder import F32, I64, PTR, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import (
    BLOCK,
    PAIRS,
    TILE_ROWS,
    Dtypes,
    load_activation,
    load_pair,
    packed_offset,
    round_up,
)
from quire.kernels.emit.products import LINE, STREAM_BYTES

SHRUNK_ROWS = 4
"""Rows of one adapter that are multiplied by A together with vector registers of 16 lanes."""

_BLOCKS_PER_PASS = 16
"""Blocks of 32 k of rows of x that are f32 at a time: few enough for the first-level cache."""

_PAIRS_PER_ITERATION = 4
"""Pairs of k in one iteration of the innermost loop. Fully unrolled, LLVM would hoist and spill its loads."""


@dataclass(frozen=True)
class ShrinkKernel(Kernel):
    """The short vectors of rows that have adapters.

    Work items are `tiles` tiles of 16 ranks times groups of `rows` rows, those of a tile one after the other. Buffers:
    x (packed activations of `k` columns), the adapters of a step's rows, i32, with `head` the numbers of those that
    have logits, which then are the rows of x, the table, s f32 [m, 16 * tiles].
    """

    k: int
    tiles: int
    head: bool = False
    rows: int = 1

    @property
    def shape(self) -> str:
        """See Kernel."""
        return f"{self.k} x {self.tiles * TILE_ROWS}"

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        x, adapters, *gathered, table, out = (b.buffer(i) for i in range(4 + self.head))
        rows, count = RowAdapters(adapters, *gathered), b.dim("logit_rows" if self.head else "tokens")
        groups = (count + (self.rows - 1)) // self.rows

        with b.items() as item:
            tile, first = item // groups, item % groups * self.rows

            def shrink(row: Value, size: int) -> None:
                entry = b.address(table, rows.number(b, row) * ENTRY_BYTES)
                with b.when(tile < b.load(entry, 24, I64)):
                    pairs = [(row + i, b.address(out, (row + i) * (self.tiles * 64))) for i in range(size)]
                    self._shrink(b, context.dtypes, x, pairs, entry, tile)

            rows.grouped(b, first, self.rows, count, shrink)

    def _shrink(
        self, b: Builder, dtypes: Dtypes, x: Value, rows: Sequence[tuple[Value, Value]], entry: Value, tile: Value
    ) -> None:
        """Store a tile of the short vectors of rows of x, whose numbers come with the addresses of the vectors."""
        plain, blocks = dtypes.plain, round_up(self.k, BLOCK) // BLOCK
        pair_bytes = plain.tile_bytes // PAIRS
        weights = b.address(b.load(entry, 0, PTR), tile * (blocks * plain.tile_bytes))
        memory = None if dtypes.activations == F32 else b.scratch(len(rows) * _BLOCKS_PER_PASS * (BLOCK * 4))
        with b.loop(0, blocks, _BLOCKS_PER_PASS, state=[b.constant(0.0, VF32)] * (4 * len(rows))) as start:
            stop = (start.index + _BLOCKS_PER_PASS).min(blocks)
            floats = [self._floats(b, dtypes, x, row, i, start.index, stop, memory) for i, (row, _) in enumerate(rows)]
            with b.loop(start.index, stop, state=start.state) as block:
                at = b.address(weights, block.index * plain.tile_bytes)
                sources = [b.address(base, (block.index - start.index) * step) for base, step in floats]
                with b.loop(0, PAIRS, _PAIRS_PER_ITERATION, state=block.state) as some:
                    sums = list(some.state)
                    for pair in range(_PAIRS_PER_ITERATION):
                        for line in range(0, pair_bytes, LINE):
                            b.prefetch(at, (some.index + pair) * pair_bytes + (STREAM_BYTES + line), level=2)
                        columns = load_pair(b, plain, at, some.index + pair)
                        for r, source in enumerate(sources):
                            for k, column in enumerate(columns, start=2 * pair):
                                value, chain = b.load(source, some.index * 8 + 4 * k, F32), 4 * r + k % 4
                                sums[chain] = b.fma(b.broadcast(value), column, sums[chain])
                    some.carry(*sums)
                block.carry(*some.results)
            start.carry(*block.results)
        scales = b.address(b.load(entry, 8, PTR), tile * 128)
        for r, (_, out) in enumerate(rows):
            first, second, third, fourth = start.results[4 * r : 4 * r + 4]
            total = (first + second) + (third + fourth)
            total = b.fma(total, b.load(scales, 0, VF32, 64), b.load(scales, 64, VF32, 64))
            b.store(total, out, tile * 64, 64)

    def _floats(
        self, b: Builder, dtypes: Dtypes, x: Value, row: Value, number: int, start: Value, stop: Value,
        memory: Value | None,
    ) -> tuple[Value, int]:  # fmt: skip
        """Return where blocks [start, stop) of a row of x are as f32, and the bytes from one to the next.

        A row of another dtype is copied to `memory`, where it is number `number` of those that are computed together.
        """
        block_bytes = TILE_ROWS * BLOCK * dtypes.activation_bytes
        source = b.address(x, packed_offset(dtypes, self.k, row, start * BLOCK))
        if memory is None:
            return source, block_bytes
        floats = b.address(memory, number * _BLOCKS_PER_PASS * (BLOCK * 4))
        with b.loop(0, stop - start) as block:
            for i in range(2):
                at = block.index * block_bytes + i * TILE_ROWS * dtypes.activation_bytes
                b.store(load_activation(b, dtypes, source, at), floats, block.index * (BLOCK * 4) + 64 * i, 64)
        return floats, BLOCK * 4
