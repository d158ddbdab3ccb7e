"""Short vectors of adapters by blocks of threads of a GPU have the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest
from kernel_calls import Array, aligned, pack_activations, to_bf16

from quire.kernels.emit.adapters import ENTRY_BYTES
from quire.kernels.emit.expert_adapters import ExpertShrinkKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.shrink import ShrinkKernel

TILES = 2
ROWS = 5
DTYPES = {"f32": Dtypes("f32", "f32", "f32"), "bf16": Dtypes("bf16", "bf16", "f32")}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


class Table:
    """Entries of random adapters, which have A and scales of so many tiles of 16 ranks."""

    def __init__(self, form: str, k: int, tiles: tuple[int, ...]) -> None:
        random, padded = np.random.default_rng(k), -(-k // 32) * 32
        self.entries = np.zeros((len(tiles), ENTRY_BYTES // 8), np.int64)
        self._memory = []  # to which the entries point
        for entry, count in zip(self.entries, tiles, strict=True):
            a = to_bf16(random.standard_normal((count, padded, 16), np.float32))
            if form == "bf16":
                pairs = a.reshape(count, padded // 2, 2, 16).transpose(0, 1, 3, 2).copy()
                a = (pairs.view(np.uint32) >> 16).astype(np.uint16)
            parts = [aligned(a), aligned(random.standard_normal((count, 2, 16), np.float32))]
            entry[[0, 1, 3]] = [part.ctypes.data for part in parts] + [count]
            self._memory += parts


def operands(form: str, k: int, rows: int) -> Array:
    values = np.random.default_rng(rows).standard_normal((rows, k), np.float32)
    return pack_activations(values if form == "f32" else to_bf16(values))


@pytest.mark.parametrize("k", [100, 1088])
@pytest.mark.parametrize("form", DTYPES)
def test_short_vectors(form: str, k: int) -> None:
    table = Table(form, k, (0, 2, 1))
    adapters, out = np.array([1, 0, 2, 1, 2], np.int32), np.full((ROWS, TILES * 16), 7, np.float32)
    buffers = [operands(form, k, ROWS), adapters, aligned(table.entries), out]
    shape = gpu_calls.compare(ShrinkKernel("s", k, TILES), DTYPES[form], buffers, ROWS, ROWS * TILES).shape
    assert shape.threads_per_item == 64


@pytest.mark.parametrize("grouped", [False, True])
def test_short_vectors_of_experts(grouped: bool) -> None:
    k, experts, top_k = 160, 3, 2
    table = Table("bf16", k, (0, 0, 0, 2, 1, 0))
    chosen = np.array([[0, 1], [2, 0], [1, 2], [1, 0], [2, 1]], np.int32)
    slots = np.random.default_rng(0).permutation(32)[: ROWS * top_k].astype(np.int32)
    adapters, entries = np.array([1, 1, 0, 1, 1], np.int32), np.full(32, -1, np.int32)
    out, x = np.full((32, TILES * 16), 7, np.float32), operands("bf16", k, 32 if grouped else ROWS)
    kernel = ExpertShrinkKernel("s", k, TILES, experts=experts, top_k=top_k, grouped=grouped)
    buffers = [x, adapters, chosen, slots, entries, aligned(table.entries), out]
    shape = gpu_calls.compare(kernel, DTYPES["bf16"], buffers, ROWS, ROWS * top_k * TILES).shape
    assert shape.threads_per_item == 64
