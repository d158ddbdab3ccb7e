"""Paged flash attention: one kernel for prefill chunks and decode, in an order that doesn't depend on the chunk.

Per query row and KV head, positions counted from 0, KV in blocks of 256 tokens: scores s[t] in the order of
products.py; u = s * (scale * log2 e); m_b the block's largest u; p = round(exp2(u - m_b)), 0 where masked; l_b the sum
of p in lanes t mod 16, folded 8, 4, 2, 1; O_b = P V in the order of products.py. Blocks fold left, ascending, from
(m = -1e30, l = 0, O = 0): M = max(m, m_b), a = exp2(m - M), c = exp2(m_b - M), O = fma(O, a, O_b c),
l = fma(l, a, l_b c). The output is O / l. A block in which a row has no valid token leaves that row as it was.

Folded into the start, a block gives (m_b, l_b, O_b) itself. So blocks may be computed apart, by any threads, and be
folded afterwards in the same order, with the same bits: that is how few long sequences keep many threads busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.kernels import _native
from quire.kernels._native import AttentionEntry, KvSplit, SplitReduction
from quire.kernels.emit.builder import Builder
from quire.kernels.emit.kv import CAPACITY, KV_TILE, Heads
from quire.kernels.emit.layout import (
    BLOCK,
    TILE_ROWS,
    Numbers,
    round_activation,
    round_up,
    store_activation,
    tiled_offset,
)
from quire.kernels.emit.math import LOG2_E, exp2
from quire.kernels.emit.products import Columns, Operand, Products
from quire.kernels.emit.value import F32, I32, I64, PTR, VF32, Value

BLOCK_TOKENS = _native.BLOCK_TOKENS
NO_SCORE = -1e30
QUERY_ROWS = 16
"""Query rows (tokens times heads of a group) that one work item handles at once."""


def tokens_per_entry(group: int) -> int:
    """Tokens of one sequence that one attention entry covers."""
    return max(1, QUERY_ROWS // group)


@dataclass(frozen=True)
class Frame:
    """The stack of one work item: scores or probabilities, output, per-row state, and the scales of int8 K and V of a
    block's tokens. All f32 but bf16 `p` for AMX."""

    u: Value
    p: Value
    out: Value
    m: Value
    l: Value  # noqa: E741  the usual name of the softmax denominator
    a: Value
    c: Value
    scales: Value


@dataclass(frozen=True)
class Entry:
    """One attention entry: `tokens` query tokens from batch row `row` on, their first position, and the KV pages."""

    row: Value
    tokens: Value | int
    position: Value
    pages: Value
    kv_head: Value


@dataclass(frozen=True)
class Attention:
    """The attention of one layer.

    Work items are entries times KV heads. Buffers: entries i64 [n][row, tokens, position, address of i32 page numbers],
    queries [kv][capacity][group][dim padded], the layer's KV tiles, out (tiled activations of query * dim columns).
    `page_tiles` is the KV tiles of a page; `window` > 0 limits each token to the last `window` tokens, itself included.

    With `partial` an entry is one query token and one block, i64 [n][row, position, pages, block], and the buffer `out`
    takes what the block gives, f32 [n][kv][group][dim padded, then m, l and padding]: see AttentionFold.
    """

    name: str
    heads: Heads
    scale: float
    page_tiles: int = 1
    window: int = 0
    partial: bool = False

    def operations(self, pairs: int) -> int:
        """Multiplications and additions of scores and values, for so many pairs of a token and one it attends to."""
        return 4 * self.heads.query * self.heads.dim * pairs

    def emit(self, products: Products) -> str:
        """The kernel as MLIR text."""
        products = replace(products, numbers=products.numbers.kv)
        b = Builder(self.name)
        entries, queries, tiles, out = (b.buffer(i) for i in range(4))
        frame = self._frame(b, products)
        with b.items() as item:
            size = KvSplit.BYTES if self.partial else AttentionEntry.BYTES
            at, kv_head = b.address(entries, item // self.heads.kv * size), item % self.heads.kv
            if self.partial:
                row, position, block = (b.load(at, i, I64) for i in (KvSplit.ROW, KvSplit.POSITION, KvSplit.BLOCK))
                entry = Entry(row, 1, position, b.load(at, KvSplit.PAGES, PTR), kv_head)
                self._attend(b, products, entry, queries, tiles, frame, block)
                size = self.heads.group * partial_bytes(self.heads)
                self._write_partial(b, frame, b.address(out, item * size))
            else:
                fields = AttentionEntry.ROW, AttentionEntry.TOKENS, AttentionEntry.POSITION
                row, tokens, position = (b.load(at, i, I64) for i in fields)
                entry = Entry(row, tokens, position, b.load(at, AttentionEntry.PAGES, PTR), kv_head)
                self._attend(b, products, entry, queries, tiles, frame)
                _write_output(b, self.heads, products.numbers, entry, frame.out, frame.l, out)
        return b.text()

    def _frame(self, b: Builder, products: Products) -> Frame:
        rows = round_up(max(QUERY_ROWS, self.heads.group), QUERY_ROWS)
        u = b.scratch(rows * BLOCK_TOKENS * 4)
        p = b.scratch(rows * BLOCK_TOKENS * 2) if products.uses_tiles else u
        out = b.scratch(rows * self.heads.blocks * BLOCK * 4)
        m, l, a, c = (b.scratch(rows * 4) for _ in range(4))  # noqa: E741
        return Frame(u, p, out, m, l, a, c, b.scratch(2 * BLOCK_TOKENS * 4))

    def _attend(
        self, b: Builder, products: Products, entry: Entry, queries: Value, tiles: Value, frame: Frame,
        only: Value | None = None,
    ) -> None:  # fmt: skip
        """Folds the entry's blocks, or the `only` one if any of its tokens are valid, into the start of a frame."""
        h, numbers = self.heads, products.numbers
        rows = b.index(entry.tokens) * h.group
        _start(b, h, rows, frame.out, frame.m, frame.l)
        first_row = (entry.kv_head * b.dim(CAPACITY) + entry.row) * h.group
        q = Operand(
            b.address(queries, first_row * h.query_bytes(numbers)),
            h.query_bytes(numbers),
            BLOCK * numbers.activation_bytes,
            TILE_ROWS * h.query_bytes(numbers),
        )
        context = entry.position + entry.tokens
        first = (entry.position + (1 - self.window)).max(0) // BLOCK_TOKENS if self.window else b.index(0)
        stop = (context + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
        if only is not None:
            first, stop = first.max(only), stop.min(only + 1)
        with b.loop(first, stop) as block:
            start = block.index * BLOCK_TOKENS
            count = ((context - start + (KV_TILE - 1)) // KV_TILE).min(BLOCK_TOKENS // KV_TILE)
            if numbers.integer_kv:
                self._copy_scales(b, products, entry, tiles, start // KV_TILE, count, frame)
            self._scores(b, products, entry, q, rows, tiles, start // KV_TILE, count, frame)
            with b.loop(0, rows) as row:
                self._softmax(b, products, frame, row.index, entry.position + row.index // h.group - start, count)
            self._values(b, products, entry, rows, tiles, start // KV_TILE, count, frame)

    def _tile(self, b: Builder, products: Products, entry: Entry, tiles: Value, number: Value) -> Value:
        """The address of the entry's KV head in the sequence's KV tile `number`."""
        page = b.convert("arith.extui", b.load(entry.pages, number // self.page_tiles * 4, I32), I64)
        tile = page * self.page_tiles + number % self.page_tiles if self.page_tiles > 1 else page
        return self.heads.tile_at(b, products.numbers, tiles, entry.kv_head, tile)

    def _copy_scales(
        self, b: Builder, products: Products, entry: Entry, tiles: Value, first: Value, count: Value, frame: Frame
    ) -> None:
        """The scales of the block's keys, then of its values, each [256], from where they lie in their tiles."""
        h, numbers = self.heads, products.numbers
        with b.loop(0, count) as tile:
            keys = self._tile(b, products, entry, tiles, first + tile.index)
            for source, target in ((0, 0), (h.value_offset(numbers), BLOCK_TOKENS * 4)):
                for part in (0, 64):
                    value = b.load(keys, source + h.scales_offset(numbers) + part, VF32, 64)
                    b.store(value, frame.scales, tile.index * (KV_TILE * 4) + (target + part), 64)

    def _scores(
        self, b: Builder, products: Products, entry: Entry, q: Operand, rows: Value, tiles: Value, first: Value,
        count: Value, frame: Frame,
    ) -> None:  # fmt: skip
        """u of every row and every token of the block's KV tiles; the values, wanted next, are called for meanwhile."""
        factor = b.constant(self.scale * LOG2_E, VF32)
        with b.loop(0, count) as tile:
            keys = self._tile(b, products, entry, tiles, first + tile.index)
            values_after = b.address(keys, self.heads.value_offset(products.numbers))

            def sink(row: Value, values: Sequence[Value]) -> None:
                at = b.address(frame.u, (row * BLOCK_TOKENS + tile.index * KV_TILE) * 4)
                for i, value in enumerate(values):
                    scale = factor
                    if products.numbers.integer_kv:
                        scale = factor * b.load(frame.scales, tile.index * (KV_TILE * 4) + 64 * i, VF32, 64)
                    b.store(value * scale, at, 64 * i, 64)

            size = products.numbers.block_bytes
            columns = Columns(
                self.heads.blocks,
                lambda j: b.address(keys, j * size),
                lambda j: [b.address(values_after, j * size)],
            )
            products.emit(b, q, rows, columns, sink)

    def _softmax(self, b: Builder, products: Products, frame: Frame, row: Value, position: Value, count: Value) -> None:
        """Probabilities of one row in the block, and the row's m, l, a and c. `position` counts from the block."""
        u = b.address(frame.u, row * (BLOCK_TOKENS * 4))
        p_bytes = products.numbers.activation_bytes
        p = b.address(frame.p, row * (BLOCK_TOKENS * p_bytes))
        last = b.broadcast(b.convert("arith.trunci", position, I32))
        lanes = b.lane_numbers()

        def valid(group: Value) -> Value:
            token = lanes + b.broadcast(b.convert("arith.trunci", group * 16, I32))
            inside = token <= last
            return inside & (last - (self.window - 1) <= token) if self.window else inside

        none = b.constant(NO_SCORE, VF32)
        with b.loop(0, count * 2, state=[none]) as group:
            score = b.select(valid(group.index), b.load(u, group.index * 64, VF32, 64), none)
            b.store(score, u, group.index * 64, 64)
            group.carry(score.max(group.state[0]))
        m_block = b.fold_lanes(group.results[0], lambda left, right: left.max(right))
        shift = b.broadcast(m_block)
        with b.loop(0, count * 2, state=[b.constant(0.0, VF32)]) as group:
            weight = round_activation(b, products.numbers, exp2(b, b.load(u, group.index * 64, VF32, 64) - shift))
            weight = b.select(valid(group.index), weight, 0.0)
            group.carry(group.state[0] + weight)
            if products.numbers.integer_kv:
                weight = weight * b.load(frame.scales, group.index * 64 + BLOCK_TOKENS * 4, VF32, 64)
            store_activation(b, products.numbers, weight, p, group.index * (16 * p_bytes))
        l_block = b.fold_lanes(group.results[0], lambda left, right: left + right)
        _fold_row(b, row, m_block, l_block, frame.m, frame.l, frame.a, frame.c)

    def _values(
        self, b: Builder, products: Products, entry: Entry, rows: Value, tiles: Value, first: Value, count: Value,
        frame: Frame,
    ) -> None:  # fmt: skip
        """O_b of every row, folded into O as it is finished; the keys of the next block are called for meanwhile."""
        h, numbers = self.heads, products.numbers
        row_bytes = BLOCK_TOKENS * numbers.activation_bytes
        p = Operand(frame.p, row_bytes, BLOCK * numbers.activation_bytes, TILE_ROWS * row_bytes)
        last = (entry.position + (b.index(entry.tokens) - 1)) // KV_TILE
        with b.loop(0, h.blocks) as block:

            def values_at(tile: Value) -> Value:
                base = self._tile(b, products, entry, tiles, first + tile)
                return b.address(base, block.index * numbers.block_bytes + h.value_offset(numbers))

            def keys_after(tile: Value) -> list[Value]:
                number = (first + tile + BLOCK_TOKENS // KV_TILE).min(last)
                return [b.address(self._tile(b, products, entry, tiles, number), block.index * numbers.block_bytes)]

            def sink(row: Value, values: Sequence[Value]) -> None:
                a, c = (b.broadcast(b.load(source, row * 4, F32)) for source in (frame.a, frame.c))
                at = b.address(frame.out, (row * h.blocks + block.index) * (BLOCK * 4))
                for i, value in enumerate(values):
                    b.store(b.fma(b.load(at, 64 * i, VF32, 64), a, value * c), at, 64 * i, 64)

            products.emit(b, p, rows, Columns(count, values_at, keys_after), sink)

    def _write_partial(self, b: Builder, frame: Frame, out: Value) -> None:
        width = self.heads.blocks * 2
        with b.loop(0, self.heads.group) as row:
            target = b.address(out, row.index * partial_bytes(self.heads))
            with b.loop(0, width) as part:
                b.store(b.load(frame.out, (row.index * width + part.index) * 64, VF32, 64), target, part.index * 64, 64)
            for i, source in enumerate((frame.m, frame.l)):
                b.store(b.load(source, row.index * 4, F32), target, width * 64 + 4 * i)


@dataclass(frozen=True)
class AttentionFold:
    """Folds the blocks that partial attention computed, in order, and writes the output.

    Work items are query tokens times KV heads. Buffers: splits i64 [n][row, first entry of partial attention, entries],
    what partial attention gave, out (tiled activations of query * dim columns).
    """

    name: str
    heads: Heads

    def emit(self, numbers: Numbers) -> str:
        """The kernel as MLIR text."""
        b = Builder(self.name)
        h, width = self.heads, self.heads.blocks * 2
        splits, partials, target = (b.buffer(i) for i in range(3))
        out = b.scratch(h.group * width * 64)
        m, l, a, c = (b.scratch(h.group * 4) for _ in range(4))  # noqa: E741
        with b.items() as item:
            at, kv_head = b.address(splits, item // h.kv * SplitReduction.BYTES), item % h.kv
            fields = SplitReduction.ROW, SplitReduction.FIRST, SplitReduction.SPLITS
            row, first, entries = (b.load(at, i, I64) for i in fields)
            _start(b, h, b.index(h.group), out, m, l)
            with b.loop(first, first + entries) as block, b.loop(0, h.group) as query:
                number = (block.index * h.kv + kv_head) * h.group + query.index
                partial = b.address(partials, number * partial_bytes(h))
                m_block, l_block = (b.load(partial, width * 64 + 4 * i, F32) for i in range(2))
                _fold_row(b, query.index, m_block, l_block, m, l, a, c)
                factors = [b.broadcast(b.load(source, query.index * 4, F32)) for source in (a, c)]
                with b.loop(0, width) as part:
                    place = (query.index * width + part.index) * 64
                    value = b.load(partial, part.index * 64, VF32, 64) * factors[1]
                    b.store(b.fma(b.load(out, place, VF32, 64), factors[0], value), out, place, 64)
            _write_output(b, h, numbers, Entry(row, 1, row, splits, kv_head), out, l, target)
        return b.text()


def partial_bytes(heads: Heads) -> int:
    """Bytes of what partial attention gives for one query row."""
    return heads.blocks * BLOCK * 4 + 64


def _start(b: Builder, heads: Heads, rows: Value, out: Value, m: Value, l: Value) -> None:  # noqa: E741
    """The state of `rows` rows before any block."""
    with b.loop(0, rows) as row:
        b.store(b.constant(NO_SCORE, F32), m, row.index * 4)
        b.store(b.constant(0.0, F32), l, row.index * 4)
        with b.loop(0, heads.blocks * 2) as part:
            b.store(b.constant(0.0, VF32), out, (row.index * (heads.blocks * 2) + part.index) * 64, 64)


def _fold_row(
    b: Builder, row: Value, m_block: Value, l_block: Value, m: Value, l: Value, a: Value, c: Value,  # noqa: E741
) -> None:  # fmt: skip
    """Folds a block's m and l into those of the row, and stores the factors a of its old O and c of the block's."""
    at = row * 4
    old = b.load(m, at, F32)
    total = old.max(m_block)
    factors = exp2(b, old - total), exp2(b, m_block - total)
    b.store(b.fma(b.load(l, at, F32), factors[0], l_block * factors[1]), l, at)
    for value, target in zip((total, *factors), (m, a, c), strict=True):
        b.store(value, target, at)


def _write_output(
    b: Builder, heads: Heads, numbers: Numbers, entry: Entry, source: Value, l: Value, out: Value,  # noqa: E741
) -> None:  # fmt: skip
    """O / l of the entry's rows, as activations."""
    h = heads
    with b.loop(0, b.index(entry.tokens) * h.group) as row, b.loop(0, h.dim // 16) as part:
        value = b.load(source, (row.index * (h.blocks * 2) + part.index) * 64, VF32, 64)
        value = value / b.broadcast(b.load(l, row.index * 4, F32))
        column = (entry.kv_head * h.group + row.index % h.group) * h.dim + part.index * 16
        at = tiled_offset(numbers, h.query * h.dim, entry.row + row.index // h.group, column)
        store_activation(b, numbers, value, out, at)
