"""KV pages: the location of a token's K and V, and the kernel that writes them there.

Tokens are stored in KV tiles of 32; a page is one or more tiles. For each KV head, a layer holds all tiles of the pool;
a tile of a head is its K, then its V. A head therefore reads consecutive pages of a sequence as one stream, and its
reads are not spaced by a power of two, which would crowd them into a few sets of a cache.

K of a head is a packed matrix of 32 columns (tokens) by head_dim; V is one of head_dim columns by 32 (tokens). Both are
read as the weights of a product (see layout.py). head_dim is padded to a multiple of 32 with zeros. int8 K and V of a
head are each followed by the f32 scales of the 32 tokens; such K, and the queries that meet them, are Hadamard
transforms (rotation.py). Latent attention stores K alone, whose last elements are V, and rotates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.kernels import _native
from quire.kernels.attention_heads import Heads
from quire.kernels.emit.builder import BF16, F32, I16, I32, I64, VF32, VI32, Builder, Value, vector
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import BLOCK, PAIRS, TILE_ROWS, Dtypes, round_activation, round_up, store_activation
from quire.kernels.emit.math import int8_scale, magnitude_bits, nearest_int8, round_bf16, rsqrt
from quire.kernels.emit.rotation import head_group, transform_head

KV_TILE = _native.KV_TILE_TOKENS
"""Tokens of a KV tile."""


def blocks_of(heads: Heads) -> int:
    """Return the number of blocks of 32 that cover a head."""
    return round_up(heads.dim, BLOCK) // BLOCK


def value_blocks_of(heads: Heads) -> int:
    """Return the number of blocks of 32 that cover a value."""
    return round_up(heads.value_dim, BLOCK) // BLOCK


@dataclass(frozen=True)
class KvLayout:
    """Layout of an attention layer's queries and KV tiles."""

    heads: Heads
    dtypes: Dtypes

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V of one head in a KV tile."""
        return self.key_bytes if self.heads.latent else 2 * self.key_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in one layer."""
        return self.heads.kv * self.tile_bytes // KV_TILE

    @property
    def key_bytes(self) -> int:
        """Bytes of K of one head in a KV tile."""
        return self.scales_offset + (KV_TILE * 4 if self.dtypes.quantized_kv else 0)

    @property
    def value_offset(self) -> int:
        """Offset of V, or of the K that is V too, in a tile of a head, in bytes."""
        return 0 if self.heads.latent else self.key_bytes

    @property
    def scales_offset(self) -> int:
        """Offset of the int8 scales from the start of K, or of V, in a tile of a head, in bytes."""
        return blocks_of(self.heads) * self.dtypes.kv.block_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of one query head of one token."""
        return blocks_of(self.heads) * BLOCK * self.dtypes.activation_bytes

    def tile_at(self, b: Builder, layer: Value, head: Value, tile: Value) -> Value:
        """Return the address of a KV head's tile number `tile` in the pages of a layer."""
        return b.address(layer, (head * b.dim("kv_tiles") + tile) * self.tile_bytes)


@dataclass(frozen=True)
class PagedKv:
    """KV of one head of a sequence in a layer: the layer's KV tiles, and the i32 numbers of the sequence's pages."""

    layout: KvLayout
    tiles: Value
    pages: Value
    head: Value
    page_tiles: int

    def tile(self, b: Builder, number: Value) -> Value:
        """Return the address of the head in KV tile `number` of the sequence."""
        page = b.convert("arith.extui", b.load(self.pages, number // self.page_tiles * 4, I32), I64)
        tile = page * self.page_tiles + number % self.page_tiles if self.page_tiles > 1 else page
        return self.layout.tile_at(b, self.tiles, self.head, tile)


@dataclass(frozen=True)
class SplitHeadsKernel(Kernel):
    """Prepares attention: norms and rotates heads, rounds and packs queries, writes K and V to their pages.

    Where KV is int8, queries and keys become Hadamard transforms before they are rounded.

    Work items are tokens times KV heads. Buffers: the heads f32 [m, (query + 2 kv) dim rounded up to 32], positions i32
    [m], queries [kv][max tokens][group][dim padded], KV slots i64 [m] (tile * 32 + place), the layer's KV tiles, then
    if `rotary` the table f32 [position][cos, sin][rotary / 2], then if `norm` the f32 weights of the query and the key
    norm [dim], and if `scaled` factors of the queries f32 [position]. `rotary` is the number of elements of a head that
    are rotated, a multiple of 16: of the first `span` ones, by default as many, the pairs (d, d + span/2) with
    d < rotary/2, or if `interleaved` (2 d, 2 d + 1).

    A norm is of each head, or `joint` of all query heads and of all key heads, whose weights are [heads * dim]; each
    work item then computes the sums of squares of its token. `norm_after_rotation` norms each rotated head.
    `value_norm`: values are divided by their root mean square.

    `rows`: the rows have queries, keys and values; or no values, which are the keys as they are there; or queries
    alone. Nothing is written to KV pages then, and there are no slots, tiles and weights of a key norm.
    """

    heads: Heads
    rotary: int = 0
    interleaved: bool = False
    norm: Literal["", "head", "joint"] = ""
    epsilon: float = 0.0
    norm_after_rotation: bool = False
    scaled: bool = False
    span: int = 0
    rows: Literal["qkv", "qk", "q"] = "qkv"
    value_norm: bool = False

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes = context.dtypes
        h, layout = self.heads, KvLayout(self.heads, dtypes)
        rows, positions, queries = (b.buffer(i) for i in range(3))
        head, key = b.own_scratch(h.dim * 4), b.scratch(h.dim * 4)
        with b.items() as item:
            token, kv_head = item // h.kv, item % h.kv
            heads = h.query + {"qkv": 2, "qk": 1, "q": 0}[self.rows] * h.kv
            row = b.address(rows, token * (round_up(heads * h.dim, BLOCK) * 4))
            position = b.convert("arith.extui", b.load(positions, token * 4, I32), I64)
            query_scale = self._joint_scale(b, row, h.query)
            with b.each(0, h.group) as q:
                self._prepare(b, row, kv_head * h.group + q.index, position, head, 0, query_scale)
                if self.scaled:
                    norms = (1 if self.rows == "q" else 2) * bool(self.norm)
                    scales = b.buffer((3 if self.rows == "q" else 5) + (self.rotary > 0) + norms)
                    self._scale(b, head, b.broadcast(b.load(scales, position * 4, F32)))
                if dtypes.quantized_kv:
                    transform_head(b, head, h.dim)
                at = (kv_head * b.dim("max_num_batched_tokens") + token) * h.group + q.index
                self._store_query(b, dtypes, head, b.address(queries, at * layout.query_bytes))
            if self.rows != "q":
                self._write_kv(b, layout, row, token, kv_head, position, key)

    def _write_kv(
        self, b: Builder, layout: KvLayout, row: Value, token: Value, kv_head: Value, position: Value, head: Value
    ) -> None:
        """Write K and V of one head of the row, by way of the scratch `head`."""
        h, slot = self.heads, b.load(b.buffer(3), token * 8, I64)
        base, place = layout.tile_at(b, b.buffer(4), kv_head, slot // KV_TILE), slot % KV_TILE
        keys = b.address(row, h.query * h.dim * 4)
        joint_scale = self._joint_scale(b, keys, h.kv)
        with b.once():
            self._prepare(b, keys, kv_head, position, head, 1, joint_scale)
            if layout.dtypes.quantized_kv:
                transform_head(b, head, h.dim, 1.0 / head_group(h.dim))
        store_key(b, layout, head, base, place)
        source = b.address(keys, (kv_head + (h.kv if self.rows == "qkv" else 0)) * (h.dim * 4))
        if self.value_norm:
            scale = b.broadcast(inverse_rms(b, source, h.dim, self.epsilon))
            with b.each(0, h.dim // 16) as part:
                b.store(b.load(source, part.index * 64, VF32, 4) * scale, head, part.index * 64, 64)
            source = head
        self._store_value(b, layout.dtypes, source, b.address(base, layout.value_offset), place)

    def _joint_scale(self, b: Builder, first: Value, heads: int) -> Value | None:
        """Return the factor of a joint norm of `heads` heads from address `first` on, in all lanes."""
        return (
            b.broadcast(inverse_rms(b, first, heads * self.heads.dim, self.epsilon)) if self.norm == "joint" else None
        )

    def _prepare(
        self, b: Builder, row: Value, number: Value, position: Value, head: Value, norm: int, scale: Value | None
    ) -> None:
        """Norm and rotate one head of the row, into the scratch `head`. `scale` is the factor of a joint norm."""
        h, table = self.heads, 3 if self.rows == "q" else 5
        source = b.address(row, number * (h.dim * 4))
        weight = b.buffer(table + (self.rotary > 0) + norm) if self.norm else None
        late = self.norm_after_rotation
        if self.norm == "head" and not late:
            scale = b.broadcast(inverse_rms(b, source, h.dim, self.epsilon))
        elif weight is not None and not late:
            weight = b.address(weight, number * (h.dim * 4))
        with b.loop(0, h.dim // 16) as part:
            value = b.load(source, part.index * 64, VF32, 4)
            if scale is not None and weight is not None:
                value = value * scale * b.load(weight, part.index * 64, VF32, 4)
            b.store(value, head, part.index * 64, 64)
        if self.rotary:
            row = b.address(b.buffer(table), position * (self.rotary * 4))
            rotate(b, head, row, self.rotary, self.interleaved, self.span)
        if late:
            self._scale(b, head, b.broadcast(inverse_rms(b, head, h.dim, self.epsilon)), weight)

    def _scale(self, b: Builder, head: Value, scale: Value, weight: Value | None = None) -> None:
        """Multiply the elements of the scratch `head` by a factor, and by their weights."""
        with b.loop(0, self.heads.dim // 16) as part:
            value = b.load(head, part.index * 64, VF32, 4) * scale
            if weight is not None:
                value = value * b.load(weight, part.index * 64, VF32, 4)
            b.store(value, head, part.index * 64, 4)

    def _store_query(self, b: Builder, dtypes: Dtypes, head: Value, target: Value) -> None:
        with b.loop(0, self.heads.dim // 16) as part:
            value = b.load(head, part.index * 64, VF32, 64)
            store_activation(b, dtypes, value, target, part.index * (16 * dtypes.activation_bytes))

    def _store_value(self, b: Builder, dtypes: Dtypes, source: Value, base: Value, place: Value) -> None:
        """Store V, which is read in pairs of tokens by 16 d."""
        if dtypes.quantized_kv:
            factor = b.broadcast(_store_scale(b, KvLayout(self.heads, dtypes), source, base, place, self.heads.dim))
            line = b.address(base, place // 2 * 32 + place % 2 * 16)
            with b.each(0, self.heads.dim // 16) as part:
                values = nearest_int8(b, b.load(source, part.index * 64, VF32, 4) * factor)
                b.store(values, line, part.index * dtypes.kv.tile_bytes, 16)
        elif dtypes.kv.weights == BF16:
            line = b.address(base, place // 2 * 64 + place % 2 * 2)
            with b.each_scalar(0, self.heads.dim) as d:
                bits = round_bf16(b, b.load(source, d.index * 4, F32)) >> 16
                at = d.index // TILE_ROWS * dtypes.tile_bytes + d.index % TILE_ROWS * 4
                b.store(b.convert("arith.trunci", bits, I16), line, at)
        else:
            line = b.address(base, place // 2 * 128 + place % 2 * 64)
            with b.each(0, self.heads.dim // 16) as part:
                value = round_activation(b, dtypes, b.load(source, part.index * 64, VF32, 4))
                b.store(value, line, part.index * dtypes.tile_bytes, 64)


def inverse_rms(b: Builder, source: Value, size: int, epsilon: float) -> Value:
    """Return 1 / sqrt(mean square + epsilon) of `size` f32, a multiple of 16, in the order of the contract."""
    with b.loop(0, size // 16, state=[b.constant(0.0, VF32)]) as part:
        value = b.load(source, part.index * 64, VF32, 4)
        part.carry(b.fma(value, value, part.state[0]))
    total = b.fold_lanes(part.results[0], lambda left, right: left + right)
    return rsqrt(b, total / float(size) + epsilon)


def rotate(b: Builder, head: Value, table: Value, rotary: int, interleaved: bool, span: int = 0) -> None:
    """Rotate `rotary` elements in place, as SplitHeadsKernel describes; in 8 lanes, as rotary/2 may be an odd multiple
    of 8."""
    half, apart = rotary // 2, (span or rotary) // 2
    lanes = vector(F32, 8)
    with b.loop(0, half // 8) as part:
        at = part.index * 32
        cos, sin = (b.load(table, at + offset * 4, lanes, 4) for offset in (0, half))
        if interleaved:
            both = b.permute(b.load(head, at * 2, VF32, 4), [*range(0, 16, 2), *range(1, 16, 2)])
            x, y = b.half(both, 0), b.half(both, 1)
            both = b.join(x * cos - y * sin, y * cos + x * sin)
            b.store(b.permute(both, [lane // 2 + lane % 2 * 8 for lane in range(16)]), head, at * 2, 4)
        else:
            x, y = (b.load(head, at + offset * 4, lanes, 4) for offset in (0, apart))
            b.store(x * cos - y * sin, head, at, 4)
            b.store(y * cos + x * sin, head, at + apart * 4, 4)


def store_key(b: Builder, layout: KvLayout, head: Value, base: Value, place: Value) -> None:
    """Store K, which is read in pairs of d by 16 tokens: this token's column is scattered, 4 bytes a pair."""
    dtypes = layout.dtypes
    if dtypes.quantized_kv:
        _store_quantized_key(b, layout, head, base, place)
        return
    column = b.address(base, place // TILE_ROWS * dtypes.tile_bytes + place % TILE_ROWS * 4)
    with b.each_scalar(0, layout.heads.dim // 2) as pair:
        even, odd = (b.load(head, pair.index * 8 + 4 * i, F32) for i in range(2))
        block = b.address(column, pair.index // PAIRS * dtypes.block_bytes)
        if dtypes.kv.weights == BF16:
            both = round_bf16(b, even) >> 16 | round_bf16(b, odd)
            b.store(both, block, pair.index % PAIRS * 64)
        else:
            at = b.address(block, pair.index % PAIRS * 128)
            b.store(round_activation(b, dtypes, even), at, 0)
            b.store(round_activation(b, dtypes, odd), at, 64)


def _store_scale(b: Builder, layout: KvLayout, source: Value, base: Value, place: Value, size: int) -> Value:
    """Store the scale of `size` elements of one token's K or V, and return its inverse."""
    with b.loop(0, size // 16, state=[b.constant(0, VI32)]) as part:
        part.carry(magnitude_bits(b, b.load(source, part.index * 64, VF32, 4)).max(part.state[0]))
    largest = b.fold_lanes(part.results[0], lambda left, right: left.max(right)).bitcast(F32)
    scale, inverse = int8_scale(b, largest)
    with b.once():
        b.store(scale, base, place * 4 + layout.scales_offset)
    return inverse


def _store_quantized_key(b: Builder, layout: KvLayout, head: Value, base: Value, place: Value) -> None:
    dtypes = layout.dtypes.kv
    factor = _store_scale(b, layout, head, base, place, layout.heads.dim)
    column = b.address(base, place // TILE_ROWS * dtypes.tile_bytes + place % TILE_ROWS)
    with b.each_scalar(0, layout.heads.dim) as d:
        value = nearest_int8(b, b.load(head, d.index * 4, F32) * factor)
        b.store(value, column, d.index // BLOCK * dtypes.block_bytes + d.index % BLOCK * 16)
