"""Attention over latents by blocks of threads of a GPU has the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest
from kernel_calls import Array, aligned, pack_activations, to_bf16

from quire.kernels.attention_heads import Heads
from quire.kernels.emit.attention import AttentionKernel, split_bytes
from quire.kernels.emit.kv import KvLayout
from quire.kernels.emit.layout import TILE_ROWS, Dtypes

TILES = 14
POSITIONS = (0, 1, 30, 31, 32, 100, 254, 255, 256, 257, 300, 383, 400, 447)
FORMS = {
    "bf16": Dtypes("bf16", "bf16", "f32"),
    "f32": Dtypes("f32", "f32", "f32"),
    "int8": Dtypes("bf16", "bf16", "f32", quantized_kv=True),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def tiles_of(heads: Heads, dtypes: Dtypes) -> Array:
    """Return random KV tiles of a layer."""
    random, layout = np.random.default_rng(1), KvLayout(heads, dtypes)
    if dtypes.quantized_kv:
        values = random.integers(-127, 128, (TILES, layout.scales_offset), np.int8).view(np.uint8)
        scales = random.uniform(1e-3, 1e-2, (TILES, 32)).astype(np.float32)
        return aligned(np.concatenate([values, scales.view(np.uint8)], axis=1))
    keys = random.standard_normal((TILES, 32 * heads.dim), np.float32)
    if dtypes.kv.weights == "f32":
        return aligned(keys)
    return aligned((to_bf16(keys).view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("heads", "form", "shared_bytes"),
    [
        (Heads(3, 1, 160, 128), "bf16", 0),
        (Heads(3, 1, 160, 128), "int8", 0),
        (Heads(3, 1, 160, 128), "f32", 0),
        (Heads(16, 1, 576, 512), "bf16", 84224),
        (Heads(20, 1, 576, 512), "bf16", 100864),
        (Heads(40, 1, 576, 512), "bf16", 100864),
        (Heads(40, 1, 160, 128), "int8", 97024),
        (Heads(128, 1, 288, 256), "bf16", 100864),
        (Heads(128, 1, 576, 512), "bf16", 84224),
    ],
    ids=str,
)
def test_latents(heads: Heads, form: str, shared_bytes: int, split: bool) -> None:
    """Each query token is an entry, and in splits the second block of its context if it has one, or else the first."""
    dtypes, count = FORMS[form], len(POSITIONS)
    pages = np.random.default_rng(0).permutation(TILES).astype(np.int32)
    fields = [
        (row, position, pages.ctypes.data, position // 256) if split else (row, 1, position, pages.ctypes.data, 0)
        for row, position in enumerate(POSITIONS)
    ]
    rows = count * heads.query + TILE_ROWS  # a tile of rows may be read where one begins
    queries = np.random.default_rng(2).standard_normal((rows, heads.dim), np.float32)
    if form != "f32":
        queries = to_bf16(queries)
    out = np.full((count, heads.query, split_bytes(heads) // 4), 7, np.float32)
    if not split:
        out = pack_activations(np.zeros((count, heads.query * heads.value_dim), np.float32))
    kernel = AttentionKernel("a", heads, 0.08, kv_split=split)
    buffers = [aligned(np.array(fields, np.int64)), aligned(queries), tiles_of(heads, dtypes), out]
    shape = gpu_calls.compare(kernel, dtypes, buffers, count, count).shape
    assert (shape.threads_per_item, shape.shared_bytes) == (256, shared_bytes)
