"""State of a softmax that is computed block by block (attention.py has the order)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.attention_heads import Heads
from quire.kernels.emit.builder import F32, VF32, Builder, Value
from quire.kernels.emit.kv import value_blocks_of
from quire.kernels.emit.layout import BLOCK, Dtypes, packed_offset, store_activation
from quire.kernels.emit.math import LOG2_E, exp2_bounded

NO_SCORE = -1e30


@dataclass(frozen=True)
class SoftmaxState:
    """Output O, largest score m and denominator l of query rows, and the factors a of their O and c of a block's O.

    All are f32. Rows are query tokens times the query heads of a KV head; those of O are [value_dim padded].
    """

    heads: Heads
    out: Value
    m: Value
    l: Value  # noqa: E741  the usual name of the softmax denominator
    a: Value
    c: Value

    @classmethod
    def reserve(cls, b: Builder, heads: Heads, rows: int) -> SoftmaxState:
        """Reserve memory for `rows` rows."""
        out = b.scratch(rows * value_blocks_of(heads) * BLOCK * 4)
        return cls(heads, out, *(b.scratch(rows * 4) for _ in range(4)))

    def start(self, b: Builder, rows: Value, kv_head: Value, sinks: Value | None) -> None:
        """Initialize `rows` rows before any block."""
        heads = self.heads
        with b.each(0, rows) as row:
            score = b.constant(NO_SCORE, F32)
            if sinks is not None:
                score = b.load(sinks, (kv_head * heads.group + row.index % heads.group) * 4, F32) * LOG2_E
            b.store(score, self.m, row.index * 4)
            b.store(b.constant(0.0 if sinks is None else 1.0, F32), self.l, row.index * 4)
            width = value_blocks_of(heads) * 2
            with b.loop(0, width) as part:
                b.store(b.constant(0.0, VF32), self.out, (row.index * width + part.index) * 64, 64)

    def reduce(self, b: Builder, row: Value, m_block: Value, l_block: Value) -> None:
        """Reduce a block's m and l of one row, or of a vector of rows from `row` on, into the rows', and store the
        factors."""
        at = row * 4
        old = b.load(self.m, at, m_block.type)
        total = old.max(m_block)
        factors = exp2_bounded(b, old - total), exp2_bounded(b, m_block - total)
        b.store(b.fma(b.load(self.l, at, l_block.type), factors[0], l_block * factors[1]), self.l, at)
        for value, target in zip((total, *factors), (self.m, self.a, self.c), strict=True):
            b.store(value, target, at)

    def factors(self, b: Builder, row: Value) -> list[Value]:
        """Return the factors of a row's O and of a block's O, in all lanes."""
        return [b.broadcast(b.load(source, row * 4, F32)) for source in (self.a, self.c)]

    def write(self, b: Builder, dtypes: Dtypes, token: Value, count: Value | int, kv_head: Value, out: Value) -> None:
        """Write O / l of `count` query tokens as activations, from row `token` of the batch on."""
        h = self.heads
        with b.each(0, b.index(count) * h.group) as row, b.loop(0, h.value_dim // 16) as part:
            value = b.load(self.out, (row.index * (value_blocks_of(h) * 2) + part.index) * 64, VF32, 64)
            value = value / b.broadcast(b.load(self.l, row.index * 4, F32))
            column = (kv_head * h.group + row.index % h.group) * h.value_dim + part.index * 16
            at = packed_offset(dtypes, h.query * h.value_dim, token + row.index // h.group, column)
            store_activation(b, dtypes, value, out, at)
