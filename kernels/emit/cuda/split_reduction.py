"""Reduction of KV splits by a block of threads: see SplitReductionKernel, and emit/attention.py for the order."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels._native import SplitReduction
from quire.kernels.emit.attention import BLOCK_TOKENS, SplitReductionKernel, first_block, split_bytes
from quire.kernels.emit.builder import F32, I64, LANES, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.kv import value_blocks_of
from quire.kernels.emit.layout import packed_offset, store_activation
from quire.kernels.emit.math import LOG2_E, exp2_bounded
from quire.kernels.emit.softmax_state import NO_SCORE


@dataclass(frozen=True)
class BlockSplitReductionKernel(SplitReductionKernel):
    """The kernel with a half-warp for each query head and 16 elements of its output, which it keeps in registers.

    Each of them computes the factors of its head anew, so that none waits for another.
    """

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        h, width = self.heads, value_blocks_of(self.heads) * 2
        reductions, splits, target = (b.buffer(i) for i in range(3))
        sinks = b.buffer(3) if self.sinks else None
        with b.items() as item:
            at, kv_head = b.address(reductions, item // h.kv * SplitReduction.BYTES), item % h.kv
            fields = SplitReduction.ROW, SplitReduction.POSITION, SplitReduction.FIRST, SplitReduction.SPLITS
            row, position, first, count = (b.load(at, i, I64) for i in fields)
            stop = first + count
            if self.window:
                first = first.max(stop - (position // BLOCK_TOKENS + 1 - first_block(b, position, self.window)))
            with b.each(0, h.group * (h.value_dim // LANES)) as task:
                query, part = task.index // (h.value_dim // LANES), task.index % (h.value_dim // LANES)
                head = kv_head * h.group + query
                m, l = b.constant(NO_SCORE, F32), b.constant(0.0, F32)  # noqa: E741
                if sinks is not None:
                    m, l = b.load(sinks, head * 4, F32) * LOG2_E, b.constant(1.0, F32)  # noqa: E741
                with b.loop(first, stop, state=[m, l, b.constant(0.0, VF32)]) as block:
                    split = b.address(splits, ((block.index * h.kv + kv_head) * h.group + query) * split_bytes(h))
                    m_block, l_block = (b.load(split, width * 64 + 4 * i, F32) for i in range(2))
                    block.carry(*_reduced(b, block.state, m_block, l_block, b.load(split, part * 64, VF32, 64)))
                _, l, out = block.results  # noqa: E741
                offset = packed_offset(context.dtypes, h.query * h.value_dim, row, head * h.value_dim + part * LANES)
                store_activation(b, context.dtypes, out / b.broadcast(l), target, offset)


def _reduced(b: Builder, state: list[Value], m_block: Value, l_block: Value, out_block: Value) -> list[Value]:
    """Return m, l and 16 elements of O after a block."""
    m, l, out = state  # noqa: E741
    total = m.max(m_block)
    a, c = exp2_bounded(b, m - total), exp2_bounded(b, m_block - total)
    return [total, b.fma(l, a, l_block * c), b.fma(out, b.broadcast(a), out_block * b.broadcast(c))]
