"""Products by blocks of threads of a GPU have the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest
from gguf_blocks import random_blocks
from kernel_calls import (
    Array,
    CompiledKernel,
    aligned,
    context_of,
    pack,
    pack_activations,
    pack_quantized,
    pack_quantized_activations,
    run,
    to_bf16,
)

from quire.kernels._native import CpuDevice, GgufMatrix, QuantizedWeights, ThreadPool
from quire.kernels.emit.cuda import choice, quantized_products
from quire.kernels.emit.cuda.choice import gpu_kernel
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.head_linear import HeadLinearKernel
from quire.kernels.emit.layout import Dtypes, QuantizedFormat

ISA = "avx2"
FLOATS = {"bf16": Dtypes("bf16", "bf16", "f32"), "f32": Dtypes("f32", "f32", "f32")}
QUANTIZED = [
    QuantizedFormat(8),
    QuantizedFormat(4),
    QuantizedFormat(8, 32),
    QuantizedFormat(8, 128, zeros=True),
    QuantizedFormat(4, 32, zeros=True),
    QuantizedFormat(4, 128),
]
GGUF = ("Q2_K", "Q3_K", "Q4_K", "Q5_1", "Q6_K", "IQ4_NL", "MXFP4")
ROWS = (1, 2, 3, 8, 9, 16, 17, 33, 129, 150)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def expect_items(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    """Have kernels suit many items, however few there are, or few."""
    most = 1 if many else 1 << 20
    monkeypatch.setattr(quantized_products, "ITEMS_OF_WIDE_TILES", most)
    monkeypatch.setattr(choice, "FEW_ITEMS", most)


class Product:
    """A kernel for a CPU, whose results are expected, and for a GPU."""

    def __init__(self, kernel: GemmKernel, dtypes: Dtypes) -> None:
        self._columns = -(-kernel.n // 32)
        self._contexts = context_of(ISA, dtypes), context_of(CUDA, dtypes)
        self._cpu = CompiledKernel(ISA, kernel.emit(self._contexts[0]), kernel.name)
        self._gpu = gpu_kernel(kernel, self._contexts[1])

    def check(self, buffers: list[Array], rows: int) -> None:
        """Compare y, the third buffer, of so many rows."""
        per_item = [context.rows_per_item for context in self._contexts]
        x, w, y, *rest = buffers
        expected = aligned(y)
        self._cpu.run([x, w, expected, *rest], [rows], (0, self._columns * -(-rows // per_item[0])))
        results = gpu_calls.run(self._gpu, buffers, rows, (per_item[1], self._columns))
        assert np.array_equal(results[2].view(np.uint32), expected.view(np.uint32)), rows


@pytest.mark.parametrize(("k", "n", "many"), [(8300, 33, False), (96, 100, False), (8300, 33, True), (96, 100, True)])
@pytest.mark.parametrize("form", FLOATS)
def test_products_of_floats(form: str, k: int, n: int, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_items(monkeypatch, many)
    random = np.random.default_rng(k)
    x, w = random.standard_normal((ROWS[-1], k), np.float32), random.standard_normal((n, k), np.float32)
    if form == "bf16":
        x, w = to_bf16(x), to_bf16(w)
    bias = aligned(random.standard_normal(-(-n // 32) * 32).astype(np.float32))
    product = Product(GemmKernel("g", k, n, bias=True, softcap=20.0), FLOATS[form])
    for rows in ROWS:
        y = np.full((rows, -(-n // 32) * 32), np.nan, np.float32)
        product.check([pack_activations(x[:rows]), pack(w, form), y, bias], rows)


@pytest.mark.parametrize("rows", [5, 45])
@pytest.mark.parametrize("epilogue", ["gate", "gated", "gating", "activation", "add"])
def test_epilogues_by_half_warps(epilogue: str, rows: int) -> None:
    random, k, n = np.random.default_rng(3), 550, 160
    x, w = (to_bf16(random.standard_normal(shape, np.float32)) for shape in ((rows, k), (n, k)))
    factors = [aligned(random.standard_normal((rows, n), np.float32))] if epilogue in ("gated", "gating") else []
    y = random.standard_normal((rows, n), np.float32) if epilogue == "add" else None
    packed = pack_activations(np.zeros((rows, n // (2 if epilogue == "gate" else 1)), np.float32)) if y is None else y
    kernel = GemmKernel("g", k, n, epilogue, activation="" if epilogue == "add" else "silu", scale=0.5)
    Product(kernel, FLOATS["bf16"]).check([pack_activations(x), pack(w, "bf16"), packed, *factors], rows)


@pytest.mark.parametrize("n", [32, 96])
@pytest.mark.parametrize("rows", [5, 37])
def test_products_of_heads(rows: int, n: int) -> None:
    random, heads, k = np.random.default_rng(n), 3, 64
    x = to_bf16(random.standard_normal((rows, heads * k), np.float32))
    w = to_bf16(random.standard_normal((heads * n, k), np.float32))
    buffers = [pack_activations(x), pack(w, "bf16"), pack_activations(np.zeros((rows, heads * n), np.float32))]
    kernel, (cpu, gpu) = HeadLinearKernel("h", heads, k, n), (context_of(isa, FLOATS["bf16"]) for isa in (ISA, CUDA))
    expected, blocks = [aligned(buffer) for buffer in buffers], heads * n // 32
    run(ISA, kernel.emit(cpu), "h", expected, [rows], (0, blocks * -(-rows // cpu.rows_per_item)))
    results = gpu_calls.run(gpu_kernel(kernel, gpu), buffers, rows, (gpu.rows_per_item, blocks))
    assert results[2].tobytes() == expected[2].tobytes()


def quantized_operands(form: QuantizedFormat, k: int, rows: int) -> Array:
    """Return random packed activations."""
    random, span = np.random.default_rng([k, rows]), form.activation_group or form.span(k)
    q = random.integers(-127, 128, (rows, k)).astype(np.int8)
    scales = random.uniform(1e-3, 1e-1, (rows, -(-k // span))).astype(np.float32)
    x = pack_quantized_activations(q, scales, form.depth(k), span)
    assert x.shape[1] == form.panel_bytes(k)
    return x


@pytest.mark.parametrize(("k", "n", "many"), [(2304, 40, False), (160, 32, False), (672, 164, True)])
@pytest.mark.parametrize("form", QUANTIZED, ids=str)
def test_products_of_quantized_weights(
    form: QuantizedFormat, k: int, n: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_items(monkeypatch, many)
    random, groups = np.random.default_rng(k), form.groups(k)
    values = random.integers(0, 1 << form.bits, (n, k), np.uint8)
    scales = random.uniform(1e-3, 1e-2, (n, groups)).astype(np.float32)
    zeros = random.integers(0, 17, (n, groups)).astype(np.int16) if form.zeros else None
    weights = pack_quantized(values, scales, zeros, form.bits, form.group)
    product = Product(GemmKernel("g", k, n, quantized=form), FLOATS["bf16"])
    for rows in ROWS:
        y = np.full((rows, -(-n // 32) * 32), np.nan, np.float32)
        product.check([quantized_operands(form, k, rows), weights, y], rows)


def test_many_items_have_tiles_of_several_blocks_of_columns() -> None:
    form, k, n, rows = QuantizedFormat(8), 64, 4096, 150
    random, blocks = np.random.default_rng(n), n // 32
    assert blocks * 2 == quantized_products.ITEMS_OF_WIDE_TILES  # of 128 rows and of 22
    values = random.integers(0, 256, (n, k), np.uint8)
    weights = pack_quantized(values, random.uniform(1e-3, 1e-2, (n, 1)).astype(np.float32), None, 8, 0)
    y = np.full((rows, n), np.nan, np.float32)
    kernel = GemmKernel("g", k, n, quantized=form)
    Product(kernel, FLOATS["bf16"]).check([quantized_operands(form, k, rows), weights, y], rows)


@pytest.mark.parametrize("many", [False, True], ids=["few items", "many items"])
@pytest.mark.parametrize("kind", GGUF)
def test_products_of_weights_of_gguf_files(kind: str, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_items(monkeypatch, many)
    form, n, k = QuantizedFormat.of_gguf(kind), 90 if many else 40, 768
    device = CpuDevice(ThreadPool(1, False))
    size = -(-n // 32) * form.block_bytes(k)
    target = device.allocate(size)
    matrix = GgufMatrix(random_blocks(kind, n, k).reshape(-1), kind, n, k, 0)
    device.pack_blocks(matrix, QuantizedWeights(target, form, k), 0, n)
    weights = aligned(np.empty(size, np.uint8))
    device.read(target, weights)
    product = Product(GemmKernel("g", k, n, quantized=form), FLOATS["bf16"])
    for rows in ROWS:
        y = np.full((rows, -(-n // 32) * 32), np.nan, np.float32)
        product.check([quantized_operands(form, k, rows), weights, y], rows)
