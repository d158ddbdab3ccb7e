"""Paged flash attention: one kernel for prefill chunks and decode, in an order that does not depend on the chunk.

Per query row and KV head, positions counted from 0, KV in blocks of 256 tokens: scores s[t] in the order of
products.py; u = s * (scale * log2 e), with a softcap u = cap * tanh(s * scale / cap) * log2 e; m_b the block's largest
u; p = round(exp2(u - m_b)), 0 where masked; l_b the sum of p in lanes t mod 16, reduced 8, 4, 2, 1; O_b = P V in the
order of products.py. Blocks are reduced in ascending order from the start (m = -1e30, l = 0, O = 0), or with a sink
(m = sink * log2 e, l = 1, O = 0): M = max(m, m_b), a = exp2(m - M), c = exp2(m_b - M), O = fma(O, a, O_b c),
l = fma(l, a, l_b c). The output is O / l. A block in which a row has no valid token leaves that row unchanged.

Reduced into the start without a sink, a block gives (m_b, l_b, O_b) itself. Blocks (KV splits, as in flash-decoding)
may therefore be computed by different threads and reduced afterwards in the same order, with the same bits: this is how
a few long sequences keep many threads busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels import _native
from quire.kernels._native import AttentionEntry, KvSplit, SplitReduction
from quire.kernels.attention_heads import Heads
from quire.kernels.emit.builder import F32, I32, I64, LANES, PTR, VF32, Builder, Value, vector
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.kv import KV_TILE, KvLayout, PagedKv, blocks_of, value_blocks_of
from quire.kernels.emit.latent_values import store_values
from quire.kernels.emit.layout import (
    BLOCK,
    TILE_ROWS,
    round_activation,
    store_activation,
    store_rounded,
)
from quire.kernels.emit.math import LOG2_E, exp2_bounded, softcap
from quire.kernels.emit.products import ColumnSink, PackedColumns, Panels, Products
from quire.kernels.emit.softmax_state import NO_SCORE, SoftmaxState

BLOCK_TOKENS = _native.BLOCK_TOKENS
SPAN = 64
"""Tokens of a row whose probabilities are computed together, so that the latency of one hides behind the others."""
_VSPAN = vector(F32, SPAN)


@dataclass(frozen=True)
class Frame:
    """Stack of one work item: scores or probabilities, state of each row, the scales of int8 K and V of a block's
    tokens, and of latents 32 columns of V of the block's tokens, unless `value_products` read these as they lie.

    All are f32, except that `p` is stored as activations, and `values` as KV pages are."""

    u: Value
    p: Value
    state: SoftmaxState
    scales: Value
    values: Value | None
    value_products: Products


@dataclass(frozen=True)
class Entry:
    """One attention entry: `tokens` query tokens from batch row `row` on, their first position, and KV of one head."""

    row: Value
    tokens: Value | int
    position: Value
    kv: PagedKv
    context: Value | None = None  # length of the whole sequence; encoders only


@dataclass(frozen=True)
class ContextBlock:
    """The block of an entry's context that begins at position `start`, of which `count` KV tiles are needed."""

    entry: Entry
    start: Value
    count: Value


class _Tokens:
    """The spans of a block's `count` KV tiles, and which of their tokens one row attends to: from `first` to `last`.

    These are relative to the block. All tokens of the first `whole` spans are valid, so that only the others need
    masks. The last span may go beyond the tiles: what is there is masked, and its probabilities are unused.
    """

    def __init__(self, b: Builder, last: Value, count: Value, first: Value | None) -> None:
        self._builder = b
        self._last = b.broadcast(b.convert("arith.trunci", last, I32), SPAN)
        self._first = None if first is None else b.broadcast(b.convert("arith.trunci", first, I32), SPAN)
        self.count = (count * KV_TILE + (SPAN - 1)) // SPAN
        self.whole = ((last + 1).max(0) // SPAN).min(self.count)
        if first is not None:
            self.whole = b.select(first <= 0, self.whole, b.index(0))

    def _valid(self, span: Value) -> Value:
        b = self._builder
        first = b.convert("arith.trunci", span * SPAN, I32)
        token = b.lane_numbers(SPAN) + b.broadcast(first, SPAN)
        inside = token <= self._last
        return inside if self._first is None else inside & (self._first <= token)

    def fold(self, step: Callable[[Value, Value | None, Value], Value], start: Value) -> Value:
        """Return `start` carried through `step(span, valid, carried)` of all spans; `valid` is None if all are."""
        with self._builder.loop(0, self.whole, state=[start]) as span:
            span.carry(step(span.index, None, span.state[0]))
        with self._builder.loop(self.whole, self.count, state=span.results) as span:
            span.carry(step(span.index, self._valid(span.index), span.state[0]))
        return span.results[0]


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """Attention of one layer.

    Work items are KV heads times entries. Those of a head follow each other, since the entries of a prompt read the
    same KV, the last one first: later tokens attend to more, and threads whose last items are short end together.
    Buffers: entries i64 [n][row, tokens, position, address of i32 page numbers, context], queries [kv][max
    tokens][group][dim padded], the layer's KV tiles, out (packed activations of query * value_dim columns), and if
    `sinks` one f32 score for each query head, which takes part in the softmax but has no value. `page_tiles` is the
    number of KV tiles of a page; `window` > 0 limits each token to the last `window` tokens, itself included. If
    `bidirectional`, tokens attend to later ones too: to all of the entry's context, or to the next `window`, themselves
    included.

    With `kv_split`, work items are entries times KV heads; an entry is one query token and one block, i64 [n][row,
    position, pages, block], and `out` receives the block's result, f32 [n][kv][group][value_dim padded, then m, l and
    padding], for SplitReductionKernel.
    """

    heads: Heads
    scale: float
    page_tiles: int = 1
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    kv_split: bool = False
    bidirectional: bool = False

    def operations(self, rows: int, pairs: int) -> int:
        """See Kernel."""
        return 2 * self.heads.query * (self.heads.dim + self.heads.value_dim) * pairs

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        products = context.kv_products
        layout = KvLayout(self.heads, products.dtypes)
        entries, queries, tiles, out = (b.buffer(i) for i in range(4))
        sinks = b.buffer(4) if self.sinks else None
        frame = self.frame(b, context)
        with b.items() as item:
            if self.kv_split:
                number, kv_head = item // self.heads.kv, item % self.heads.kv
                at = b.address(entries, number * KvSplit.BYTES)
                row, position, block = (b.load(at, i, I64) for i in (KvSplit.ROW, KvSplit.POSITION, KvSplit.BLOCK))
                kv = PagedKv(layout, tiles, b.load(at, KvSplit.PAGES, PTR), kv_head, self.page_tiles)
                size = self.heads.group * split_bytes(self.heads)
                with b.when(block >= first_block(b, position, self.window)):
                    self.attend(b, products, Entry(row, 1, position, kv), queries, frame, block)
                    self.write_split(b, frame.state, b.address(out, item * size))
            else:
                count = b.dim("entries")
                number, kv_head = count - 1 - item % count, item // count
                at = b.address(entries, number * AttentionEntry.BYTES)
                fields = AttentionEntry.ROW, AttentionEntry.TOKENS, AttentionEntry.POSITION
                row, tokens, position = (b.load(at, i, I64) for i in fields)
                whole = b.load(at, AttentionEntry.CONTEXT, I64) if self.bidirectional else None
                kv = PagedKv(layout, tiles, b.load(at, AttentionEntry.PAGES, PTR), kv_head, self.page_tiles)
                self.attend(b, products, Entry(row, tokens, position, kv, whole), queries, frame, sinks=sinks)
                frame.state.write(b, products.dtypes, row, tokens, kv_head, out)

    def frame(self, b: Builder, context: EmitContext) -> Frame:
        """Reserve the stack of a work item."""
        products, rows = context.kv_products, context.attention_rows(self.heads.group)
        latent_products = context.latent_products if self.heads.latent else None
        u = b.scratch(rows * BLOCK_TOKENS * 4)
        p = b.scratch(rows * BLOCK_TOKENS * 2) if products.dtypes.activation_bytes == 2 else u
        state = SoftmaxState.reserve(b, self.heads, rows)
        scales = b.scratch(2 * BLOCK_TOKENS * 4)
        tiles = BLOCK_TOKENS // KV_TILE
        is_copied = self.heads.latent and latent_products is None
        values = b.scratch(tiles * products.dtypes.block_bytes) if is_copied else None
        return Frame(u, p, state, scales, values, latent_products or products)

    def attend(
        self, b: Builder, products: Products, entry: Entry, queries: Value, frame: Frame,
        only: Value | None = None, sinks: Value | None = None,
    ) -> None:  # fmt: skip
        """Reduce the entry's blocks, or the `only` one if any of its tokens are valid, into the start of a frame."""
        h, dtypes = self.heads, products.dtypes
        rows = b.index(entry.tokens) * h.group
        frame.state.start(b, rows, entry.kv.head, sinks)
        query_bytes = entry.kv.layout.query_bytes
        first_row = (entry.kv.head * b.dim("max_num_batched_tokens") + entry.row) * h.group
        q = Panels(
            b.address(queries, first_row * query_bytes),
            query_bytes,
            BLOCK * dtypes.activation_bytes,
            TILE_ROWS * query_bytes,
        )
        context = self._context(entry)
        first = first_block(b, entry.position, self.window)
        stop = (context + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
        if only is not None:
            first, stop = first.max(only), stop.min(only + 1)
        with b.loop(first, stop) as number:
            start = number.index * BLOCK_TOKENS
            count = ((context - start + (KV_TILE - 1)) // KV_TILE).min(BLOCK_TOKENS // KV_TILE)
            block = ContextBlock(entry, start, count)
            if dtypes.quantized_kv:
                self._copy_scales(b, block, frame)
            self._scores(b, products, q, rows, block, frame)
            self._softmax(b, products, rows, block, frame)
            self._values(b, rows, block, frame)

    def _context(self, entry: Entry) -> Value:
        """Return the number of tokens up to the last one that any row of the entry attends to."""
        end = entry.position + entry.tokens
        if entry.context is None:
            return end
        return (end + (self.window - 1)).min(entry.context) if self.window else entry.context

    def _attended(self, b: Builder, block: ContextBlock, row: Value) -> _Tokens:
        """Return the tokens of a block that one row attends to."""
        entry, count = block.entry, block.count
        position = entry.position - block.start + row // self.heads.group
        first = position - (self.window - 1) if self.window else None
        if entry.context is None:
            return _Tokens(b, position, count, first)
        last = entry.context - block.start - 1
        return _Tokens(b, (position + (self.window - 1)).min(last) if self.window else last, count, first)

    def _copy_scales(self, b: Builder, block: ContextBlock, frame: Frame) -> None:
        """Copy the scales of the block's keys, then of its values, each [256], from their tiles; prefetch the next
        block's."""
        kv, first = block.entry.kv, block.start // KV_TILE
        with b.each(0, block.count) as tile:
            keys, after = kv.tile(b, first + tile.index), self._tile_after(b, block, tile.index)
            for source, target in ((0, 0), (kv.layout.value_offset, BLOCK_TOKENS * 4)):
                for part in (0, 64):
                    b.prefetch(after, source + kv.layout.scales_offset + part, level=2)
                    value = b.load(keys, source + kv.layout.scales_offset + part, VF32, 64)
                    b.store(value, frame.scales, tile.index * (KV_TILE * 4) + (target + part), 64)

    def _tile_after(self, b: Builder, block: ContextBlock, tile: Value) -> Value:
        """Return the address of the next block's KV tile number `tile`, or of the last one that is attended to."""
        last = (self._context(block.entry) - 1) // KV_TILE
        return block.entry.kv.tile(b, ((block.start + BLOCK_TOKENS) // KV_TILE + tile).min(last))

    def _scores(
        self, b: Builder, products: Products, q: Panels, rows: Value, block: ContextBlock, frame: Frame
    ) -> None:
        """Compute u of every row and token of the block's KV tiles, and prefetch the values, which are needed next.

        Values that are within the keys are prefetched by the products already.
        """
        kv, first = block.entry.kv, block.start // KV_TILE
        factor = b.constant(self.scale * LOG2_E, VF32) if not self.softcap else None
        size = products.dtypes.block_bytes

        def columns(tile: Value) -> PackedColumns:
            keys = kv.tile(b, first + tile)
            values_after = b.address(keys, kv.layout.value_offset)
            return PackedColumns(
                blocks_of(self.heads),
                lambda j: b.address(keys, j * size),
                lambda j: [] if self.heads.latent else [b.address(values_after, j * size)],
            )

        def store(tile: Value, row: Value, values: Sequence[Value]) -> None:
            at = b.address(frame.u, (row * BLOCK_TOKENS + tile * KV_TILE) * 4)
            for i, value in enumerate(values):
                token_scale = None
                if products.dtypes.quantized_kv:
                    token_scale = b.load(frame.scales, tile * (KV_TILE * 4) + 64 * i, VF32, 64)
                b.store(self._score(b, value, factor, token_scale), at, 64 * i, 64)

        products.emit_blocks(b, q, rows, block.count, columns, ColumnSink(store))

    def _score(self, b: Builder, product: Value, factor: Value | None, token_scale: Value | None) -> Value:
        """Return u of one product, times the scale of an int8 key."""
        if factor is not None:
            return product * (factor if token_scale is None else factor * token_scale)
        score = product if token_scale is None else product * token_scale
        return softcap(b, score, self.softcap, self.scale) * LOG2_E

    def _softmax(self, b: Builder, products: Products, rows: Value, block: ContextBlock, frame: Frame) -> None:
        """Compute the probabilities of `rows` rows in the block, and their m, l, a and c.

        Until the rows are reduced, their m_b are in `c` and their l_b in `a`.
        """
        state = frame.state
        with b.each(0, rows) as row:
            tokens = self._attended(b, block, row.index)
            b.store(self._largest(b, frame, row.index, tokens), state.c, row.index * 4)
        with b.each(0, rows) as row:
            tokens = self._attended(b, block, row.index)
            b.store(self._probabilities(b, products, frame, row.index, tokens), state.a, row.index * 4)
        with b.each(0, rows, LANES) as first:
            m_block, l_block = (b.load(source, first.index * 4, VF32, 64) for source in (state.c, state.a))
            state.reduce(b, first.index, m_block, l_block)

    def _largest(self, b: Builder, frame: Frame, row: Value, tokens: _Tokens) -> Value:
        """Return m_b of one row."""
        u = b.address(frame.u, row * (BLOCK_TOKENS * 4))

        def step(span: Value, valid: Value | None, largest: Value) -> Value:
            score = b.load(u, span * (SPAN * 4), _VSPAN, 64)
            return (score if valid is None else b.select(valid, score, NO_SCORE)).max(largest)

        largest = tokens.fold(step, b.constant(NO_SCORE, _VSPAN))
        return b.fold_lanes(largest, lambda left, right: left.max(right))

    def _probabilities(self, b: Builder, products: Products, frame: Frame, row: Value, tokens: _Tokens) -> Value:
        """Compute the probabilities of one row, whose m_b is in `c`, and return l_b."""
        dtypes = products.dtypes
        u = b.address(frame.u, row * (BLOCK_TOKENS * 4))
        p = b.address(frame.p, row * (BLOCK_TOKENS * dtypes.activation_bytes))
        shift = b.broadcast(b.load(frame.state.c, row * 4, F32), SPAN)

        def step(span: Value, valid: Value | None, total: Value) -> Value:
            weight = round_activation(b, dtypes, exp2_bounded(b, b.load(u, span * (SPAN * 4), _VSPAN, 64) - shift))
            if valid is not None:
                weight = b.select(valid, weight, 0.0)
            for part in b.parts(weight):
                total = total + part
            at = span * (SPAN * dtypes.activation_bytes)
            if dtypes.quantized_kv:
                scale = b.load(frame.scales, span * (SPAN * 4) + BLOCK_TOKENS * 4, _VSPAN, 64)
                store_activation(b, dtypes, weight * scale, p, at)
            else:
                store_rounded(b, dtypes, weight, p, at)
            return total

        return b.fold_lanes(tokens.fold(step, b.constant(0.0, VF32)), lambda left, right: left + right)

    def _values(self, b: Builder, rows: Value, block: ContextBlock, frame: Frame) -> None:
        """Compute O_b of every row and reduce it into O; prefetch the keys of the next block."""
        kv = block.entry.kv
        products, blocks = frame.value_products, value_blocks_of(self.heads)
        dtypes = products.dtypes
        latent_offset = (blocks_of(self.heads) - blocks) * dtypes.block_bytes
        value_offset = kv.layout.value_offset + latent_offset
        first = block.start // KV_TILE
        row_bytes = BLOCK_TOKENS * dtypes.activation_bytes
        p = Panels(frame.p, row_bytes, BLOCK * dtypes.activation_bytes, TILE_ROWS * row_bytes)

        def columns(number: Value) -> PackedColumns:
            if frame.values is not None:
                with b.loop(0, block.count) as tile:
                    base = kv.tile(b, first + tile.index)
                    keys = b.address(base, number * dtypes.block_bytes + latent_offset)
                    store_values(b, dtypes, keys, b.address(frame.values, tile.index * dtypes.block_bytes))

            def values_at(tile: Value) -> Value:
                if frame.values is not None:
                    return b.address(frame.values, tile * dtypes.block_bytes)
                base = kv.tile(b, first + tile)
                return b.address(base, number * dtypes.block_bytes + value_offset)

            def keys_after(tile: Value) -> list[Value]:
                return [b.address(self._tile_after(b, block, tile), number * dtypes.block_bytes)]

            return PackedColumns(block.count, values_at, keys_after)

        def store(number: Value, row: Value, values: Sequence[Value]) -> None:
            a, c = frame.state.factors(b, row)
            at = b.address(frame.state.out, (row * blocks + number) * (BLOCK * 4))
            for i, value in enumerate(values):
                b.store(b.fma(b.load(at, 64 * i, VF32, 64), a, value * c), at, 64 * i, 64)

        products.emit_blocks(b, p, rows, blocks, columns, ColumnSink(store))

    def write_split(self, b: Builder, state: SoftmaxState, out: Value) -> None:
        """Write the result of one block for all rows."""
        width = value_blocks_of(self.heads) * 2
        with b.each(0, self.heads.group) as row:
            target = b.address(out, row.index * split_bytes(self.heads))
            with b.loop(0, width) as part:
                b.store(b.load(state.out, (row.index * width + part.index) * 64, VF32, 64), target, part.index * 64, 64)
            for i, source in enumerate((state.m, state.l)):
                b.store(b.load(source, row.index * 4, F32), target, width * 64 + 4 * i)


@dataclass(frozen=True)
class SplitReductionKernel(Kernel):
    """Reduces the KV splits of query tokens in order, and writes the output.

    Splits before the `window` are not reduced: they belong to layers with a longer one. Work items are query tokens
    times KV heads. Buffers: reductions i64 [n][row, position, first KV split, number of KV splits], the results of the
    KV splits, out (packed activations of query * value_dim columns), and if `sinks` the sinks.
    """

    heads: Heads
    window: int = 0
    sinks: bool = False

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        h, width = self.heads, value_blocks_of(self.heads) * 2
        reductions, splits, target = (b.buffer(i) for i in range(3))
        sinks = b.buffer(3) if self.sinks else None
        state = SoftmaxState.reserve(b, h, h.group)
        with b.items() as item:
            at, kv_head = b.address(reductions, item // h.kv * SplitReduction.BYTES), item % h.kv
            fields = SplitReduction.ROW, SplitReduction.POSITION, SplitReduction.FIRST, SplitReduction.SPLITS
            row, position, first, count = (b.load(at, i, I64) for i in fields)
            stop = first + count
            if self.window:
                seen = position // BLOCK_TOKENS + 1 - first_block(b, position, self.window)
                first = first.max(stop - seen)
            state.start(b, b.index(h.group), kv_head, sinks)
            with b.loop(first, stop) as block, b.loop(0, h.group) as query:
                number = (block.index * h.kv + kv_head) * h.group + query.index
                split = b.address(splits, number * split_bytes(h))
                m_block, l_block = (b.load(split, width * 64 + 4 * i, F32) for i in range(2))
                state.reduce(b, query.index, m_block, l_block)
                factors = state.factors(b, query.index)
                with b.loop(0, width) as part:
                    place = (query.index * width + part.index) * 64
                    value = b.load(split, part.index * 64, VF32, 64) * factors[1]
                    b.store(b.fma(b.load(state.out, place, VF32, 64), factors[0], value), state.out, place, 64)
            state.write(b, context.dtypes, row, 1, kv_head, target)


def split_bytes(heads: Heads) -> int:
    """Return the bytes of the result of one KV split for one query row."""
    return value_blocks_of(heads) * BLOCK * 4 + 64


def first_block(b: Builder, position: Value, window: int) -> Value:
    """Return the first block that a token attends to; `window` 0 means all."""
    return (position + (1 - window)).max(0) // BLOCK_TOKENS if window else b.index(0)
