"""Inputs of a step, which the host writes, are fetched once for all kernels of a GPU."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest

from quire.kernels._native import Dim
from quire.kernels.emit.fetch import FETCH_PARTS, FetchKernel
from quire.kernels.emit.layout import Dtypes


@pytest.mark.parametrize("rows", [1, 2, 5, 300])
def test_arrays_are_copied(rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)
    sizes = [4, 40, 8, 64]
    kernel = FetchKernel("fetch", tuple(zip(list(Dim.__members__)[: len(sizes)], sizes, strict=True)))
    random = np.random.default_rng(rows)
    arrays = [random.integers(256, size=rows * size + 64, dtype=np.uint8) for size in sizes]
    given = [*arrays, *(np.zeros_like(array) for array in arrays)]
    dtypes = Dtypes("bf16", "bf16", "f32")
    gpu_calls.compare(kernel, dtypes, given, rows, FETCH_PARTS * len(arrays))
    found = gpu_calls.run(gpu_calls.chosen(kernel, dtypes), given, rows, (rows, FETCH_PARTS * len(arrays)))
    for array, size, copy in zip(arrays, sizes, found[len(arrays) :], strict=True):
        assert copy[: rows * size].tobytes() == array[: rows * size].tobytes()
        assert not copy[-(-rows * size // 8) * 8 :].any()
