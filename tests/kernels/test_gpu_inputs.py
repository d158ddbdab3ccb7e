"""Inputs of a step, which the host writes, are fetched once for all kernels of a GPU."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest

from quire.kernels.emit.fetch import FETCH_PARTS, FetchKernel
from quire.kernels.emit.layout import Dtypes


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 300])
def test_arrays_are_copied(rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)
    sizes = {"tokens": 4, "entries": 40, "kv_splits": 32, "state_writes": 16, "state_entries": 32}
    counts = {"tokens": 7, "entries": 3 * rows, "kv_splits": 0, "state_writes": rows, "state_entries": rows // 2}
    kernel = FetchKernel("fetch", tuple(sizes.items()))
    random = np.random.default_rng(rows)
    arrays = [random.integers(256, size=counts[dim] * size + 64, dtype=np.uint8) for dim, size in sizes.items()]
    given = [*arrays, *(np.zeros_like(array) for array in arrays)]
    chosen = gpu_calls.chosen(kernel, Dtypes("bf16", "bf16", "f32"))
    found = gpu_calls.run(chosen, given, 1, (1000, FETCH_PARTS * len(arrays)), counts)
    for array, (dim, size), copy in zip(arrays, sizes.items(), found[len(arrays) :], strict=True):
        whole = counts[dim] * size
        assert copy[:whole].tobytes() == array[:whole].tobytes()
        assert not copy[-(-whole // 8) * 8 :].any()
