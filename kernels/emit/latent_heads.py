"""The kernel that prepares latent attention (lowering/latent_attention.py)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.attention_heads import LatentHeads
from quire.kernels.emit.builder import I32, I64, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.kv import KV_TILE, KvLayout, inverse_rms, rotate, store_key
from quire.kernels.emit.layout import Dtypes, packed_offset, store_activation


@dataclass(frozen=True)
class LatentHeadsKernel(Kernel):
    """Rotates and packs queries, norms the latent, and writes the key, which is the rotated part and the latent.

    Work items are tokens. Buffers: queries f32 [m, query_columns], of which the first are [query][nope + rope]; latents
    f32 [m, latent_columns], of which those from `first_latent` on are the latent [rank] and the key part to rotate
    [rope]; positions i32 [m]; KV slots i64 [m]; the weight of the latent's norm f32 [rank]; the rotary table; out the
    queries of attention, whose first `rope` elements are written; out the other parts, as packed activations of
    query * nope columns; the layer's KV tiles.
    """

    latent_heads: LatentHeads
    query_columns: int
    latent_columns: int
    first_latent: int
    interleaved: bool
    epsilon: float

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes, h = context.dtypes, self.latent_heads
        layout = KvLayout(h.attention, dtypes)
        rows, latents, positions, slots, weight, table, queries, parts, pages = (b.buffer(i) for i in range(9))
        head, key = b.own_scratch(h.rope * 4), b.scratch((h.rope + h.rank) * 4)
        with b.items() as token:
            position = b.convert("arith.extui", b.load(positions, token * 4, I32), I64)
            angles = b.address(table, position * (h.rope * 4))
            with b.each(0, h.query) as query:
                source = b.address(rows, token * (self.query_columns * 4) + query.index * ((h.nope + h.rope) * 4))
                with b.loop(0, h.nope // 16) as part:
                    column = query.index * h.nope + part.index * 16
                    at = packed_offset(dtypes, h.query * h.nope, token, column)
                    store_activation(b, dtypes, b.load(source, part.index * 64, VF32, 4), parts, at)
                self._rotated(b, b.address(source, h.nope * 4), head, angles)
                target = b.address(queries, (token * h.query + query.index) * layout.query_bytes)
                self._store_query(b, dtypes, head, target)
            source = b.address(latents, token * (self.latent_columns * 4) + self.first_latent * 4)
            with b.once():
                self._rotated(b, b.address(source, h.rank * 4), key, angles)
            self._norm(b, source, weight, b.address(key, h.rope * 4))
            slot = b.load(slots, token * 8, I64)
            store_key(b, layout, key, layout.tile_at(b, pages, b.index(0), slot // KV_TILE), slot % KV_TILE)

    def _rotated(self, b: Builder, source: Value, head: Value, angles: Value) -> None:
        """Copy the part to rotate into `head`, and rotate it there."""
        with b.loop(0, self.latent_heads.rope // 16) as part:
            b.store(b.load(source, part.index * 64, VF32, 4), head, part.index * 64, 64)
        rotate(b, head, angles, self.latent_heads.rope, self.interleaved)

    def _store_query(self, b: Builder, dtypes: Dtypes, head: Value, target: Value) -> None:
        with b.loop(0, self.latent_heads.rope // 16) as part:
            value = b.load(head, part.index * 64, VF32, 64)
            store_activation(b, dtypes, value, target, part.index * (16 * dtypes.activation_bytes))

    def _norm(self, b: Builder, source: Value, weight: Value, out: Value) -> None:
        factor = b.broadcast(inverse_rms(b, source, self.latent_heads.rank, self.epsilon))
        with b.each(0, self.latent_heads.rank // 16) as part:
            value = b.load(source, part.index * 64, VF32, 4) * factor * b.load(weight, part.index * 64, VF32, 4)
            b.store(value, out, part.index * 64, 64)
