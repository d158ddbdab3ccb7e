"""Norms and quantized activations by blocks of threads of a GPU have the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest
from kernel_calls import Array, aligned, context_of, pack_activations, run

from quire.kernels.emit.context import Kernel
from quire.kernels.emit.cuda.choice import gpu_kernel
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import Dtypes, QuantizedFormat
from quire.kernels.emit.rows import NormKernel, QuantizeKernel

ISA = "avx2"
DTYPES = Dtypes("bf16", "bf16", "f32")
FORMATS = [None, QuantizedFormat(8), QuantizedFormat(4, 32), *(QuantizedFormat(8, g, rotated=True) for g in (32, 128))]
ROWS = 5


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def check(kernel: Kernel, buffers: list[Array], out: int) -> None:
    """Compare what a kernel writes to buffer number `out`."""
    chosen = gpu_kernel(kernel, context_of(CUDA, DTYPES))
    assert chosen.shape.threads_per_item == 256
    results = gpu_calls.run(chosen, buffers, ROWS, (1, 1))
    expected = [aligned(buffer) for buffer in buffers]
    run(ISA, kernel.emit(context_of(ISA, DTYPES)), kernel.name, expected, [ROWS], (0, ROWS))
    assert results[out].tobytes() == expected[out].tobytes()


def empty(form: QuantizedFormat | None, width: int) -> Array:
    if form is None:
        return pack_activations(np.zeros((ROWS, width), np.float32))
    return aligned(np.zeros((1, form.panel_bytes(width)), np.uint8))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("width", [160, 2080])
def test_norms(width: int, form: QuantizedFormat | None) -> None:
    random = np.random.default_rng(width)
    x, weight, bias = (aligned(random.standard_normal(shape, np.float32)) for shape in ((ROWS, width), width, width))
    x[1, 3], x[2, 5] = np.inf, np.nan
    kernel = NormKernel("n", width, 1e-5, "layer", bias=True, quantized=form)
    check(kernel, [x, weight, empty(form, width), bias], 2)


@pytest.mark.parametrize("form", FORMATS[1:], ids=str)
@pytest.mark.parametrize("width", [160, 14336])
def test_quantized_activations(width: int, form: QuantizedFormat) -> None:
    x = pack_activations(np.random.default_rng(width).standard_normal((ROWS, width), np.float32))
    check(QuantizeKernel("q", width, form), [x, empty(form, width)], 1)
