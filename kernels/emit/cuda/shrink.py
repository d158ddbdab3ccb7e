"""Short vectors of adapters by a block of threads: see ShrinkKernel, and emit/adapters.py for the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import LANES, PTR, VF32, Builder, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.expert_adapters import ExpertShrinkKernel
from quire.kernels.emit.layout import BLOCK, Dtypes, load_activation, load_pair, packed_offset, round_up
from quire.kernels.emit.shrink import ShrinkKernel

CHAINS = 4
"""Chains of a sum over k."""

SHRINK_THREADS = CHAINS * LANES
"""Threads of a block."""

_BLOCKS_AT_ONCE = 4  # of 32 k, which are loaded before they are multiplied


class _ChainsApart:
    """A half-warp for each chain of the sum."""

    k: int

    def _shrink(
        self, b: Builder, dtypes: Dtypes, x: Value, rows: Sequence[tuple[Value, Value]], entry: Value, tile: Value
    ) -> None:
        """See ShrinkKernel."""
        assert isinstance(b, BlockBuilder)
        [(row, out)] = rows
        blocks = round_up(self.k, BLOCK) // BLOCK
        weights = b.address(b.load(entry, 0, PTR), tile * (blocks * dtypes.plain.tile_bytes))
        whole, total = blocks // _BLOCKS_AT_ONCE * _BLOCKS_AT_ONCE, b.constant(0.0, VF32)
        if whole:
            with b.loop(0, whole, _BLOCKS_AT_ONCE, state=[total]) as some:
                some.carry(self._add(b, dtypes, x, row, weights, some.index, _BLOCKS_AT_ONCE, some.state[0]))
            [total] = some.results
        total = self._add(b, dtypes, x, row, weights, b.index(whole), blocks - whole, total)
        sums = b.in_turn(CHAINS * 64)
        b.store_lanes(total, sums, b.team * 64)
        b.barrier()
        with b.when(b.compare("eq", b.team, 0)), b.by_team():
            first, second, third, fourth = (b.load(sums, i * 64, VF32, 64) for i in range(CHAINS))
            scales = b.address(b.load(entry, 8, PTR), tile * 128)
            total = (first + second) + (third + fourth)
            total = b.fma(total, b.load(scales, 0, VF32, 64), b.load(scales, 64, VF32, 64))
            b.store(total, out, tile * 64, 64)

    def _add(
        self, b: BlockBuilder, dtypes: Dtypes, x: Value, row: Value, weights: Value, first: Value, count: int,
        total: Value,
    ) -> Value:  # fmt: skip
        """Return the chain's sum with that of `count` blocks of k, from number `first` on."""
        plain, is_odd = dtypes.plain, b.compare("ne", b.team % 2, 0)
        factors = []
        for block in (first + i for i in range(count)):
            tile = b.address(weights, block * plain.tile_bytes)
            source = packed_offset(dtypes, self.k, row, block * BLOCK)
            for k in range(0, BLOCK, CHAINS):
                even, odd = load_pair(b, plain, tile, b.team // 2 + k // 2)
                value = load_activation(b, dtypes, x, source + (b.team + k) * dtypes.activation_bytes, 1)
                factors.append((b.broadcast(value), b.select(is_odd, odd, even)))
        for value, column in factors:
            total = b.fma(value, column, total)
        return total


@dataclass(frozen=True)
class BlockShrinkKernel(_ChainsApart, ShrinkKernel):
    """The kernel with a half-warp for each chain."""


@dataclass(frozen=True)
class BlockExpertShrinkKernel(_ChainsApart, ExpertShrinkKernel):
    """The kernel with a half-warp for each chain."""
