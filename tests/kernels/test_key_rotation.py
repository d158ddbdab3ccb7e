"""Keys in int8 are Hadamard transforms, so that a large element of a head does not cost the others their bits."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import Array, aligned, context_of, run

from quire.kernels.attention_heads import Heads
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.kv import KvLayout, SplitHeadsKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.rotation import head_group

ISAS = [isa for isa in available_isas() if isa != "amx"]
DTYPES = Dtypes("bf16", "bf16", "f32", quantized_kv=True)
TOKENS = 32


def split(isa: str, heads: Heads, qkv: Array) -> tuple[Array, Array]:
    """Return the queries [token, group, dim], and the keys [token, dim] that the tile stands for, of one KV head."""
    layout = KvLayout(heads, DTYPES)
    padded = -(-heads.dim // 32) * 32
    queries = aligned(np.zeros((TOKENS, heads.group, padded), np.float32))
    tile = aligned(np.zeros(layout.tile_bytes, np.uint8))
    numbers = aligned(np.arange(TOKENS, dtype=np.int32))
    slots = aligned(np.arange(TOKENS, dtype=np.int64))
    text = SplitHeadsKernel("g", heads).emit(context_of(isa, DTYPES))
    run(isa, text, "g", [aligned(qkv), numbers, queries, slots, tile], [TOKENS, 0, TOKENS, 1], (0, TOKENS))
    values = tile[: layout.scales_offset].view(np.int8).reshape(padded // 32, 2, 16, 2, 16)  # block, tile, pair, 2 k, n
    keys = values.transpose(1, 4, 0, 2, 3).reshape(TOKENS, padded)[:, : heads.dim]
    scales = tile[layout.scales_offset : layout.key_bytes].view(np.float32)
    return queries[:, :, : heads.dim], keys * scales[:, None]


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("isa", ISAS)
def test_scores_of_keys_with_a_large_element(isa: str, dim: int) -> None:
    heads = Heads(2, 1, dim)
    rng = np.random.default_rng(dim)
    qkv = rng.standard_normal((TOKENS, 4 * dim), np.float32)
    qkv[:, 2 * dim + 3] = 40
    query, key = qkv[:, : 2 * dim].reshape(TOKENS, 2, dim), qkv[:, 2 * dim : 3 * dim]
    queries, keys = split(isa, heads, qkv)
    exact = np.einsum("qgd,kd->qgk", query.astype(np.float64), key.astype(np.float64))
    found = np.einsum("qgd,kd->qgk", queries.astype(np.float64), keys.astype(np.float64))
    unrotated = np.rint(key * (127 / 40)) * (40 / 127)  # as one scale a token gives it
    worse = np.einsum("qgd,kd->qgk", query.astype(np.float64), unrotated.astype(np.float64))
    assert np.abs(found - exact).mean() < np.abs(worse - exact).mean() * (0.75 if head_group(dim) < 64 else 0.4)


def test_groups_of_heads() -> None:
    assert [head_group(dim) for dim in (16, 64, 80, 96, 112, 128, 192, 256)] == [16, 64, 16, 32, 16, 128, 64, 256]
