"""Products on tensor cores in an order of their own: near the CPU's, and the same for a row whatever is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import emulated_gpu
import gpu_calls
import greedy_steps
import numpy as np
import pytest
from kernel_calls import Array, aligned, context_of, pack, pack_activations, run, to_bf16, unpack_activations

from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.cuda.choice import gpu_kernel
from quire.kernels.emit.cuda.threads import GpuKernel
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.head_linear import HeadLinearKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.errors import ModelError
from quire.kernels.kv_file import kv_format, model_name
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe

ISA = "avx2"
DTYPES = Dtypes("bf16", "bf16", "f32")
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 129, 150)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def fast_context() -> EmitContext:
    return replace(context_of(CUDA, DTYPES), fast_matmul=True)


def random_bf16(seed: int, *shape: int) -> Array:
    return to_bf16(np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32))


def launched(kernel: GpuKernel, buffers: Sequence[Array], rows: int, blocks: int) -> Array:
    """Return y, the third buffer, of so many rows."""
    return gpu_calls.run(kernel, buffers, rows, (fast_context().rows_per_item, blocks))[2]


@pytest.mark.parametrize(("k", "n"), [(8300, 33), (550, 160), (32, 32)])
def test_a_row_has_the_same_products_among_any_others(k: int, n: int) -> None:
    x, w, blocks = random_bf16(1, ROWS[-1], k), random_bf16(2, n, k), -(-n // 32)
    kernel = gpu_kernel(GemmKernel("g", k, n), fast_context())
    weights = pack(w, "bf16")

    def products(first: int, rows: int) -> Array:
        y = np.full((rows, blocks * 32), np.nan, np.float32)
        return launched(kernel, [pack_activations(x[first : first + rows]), weights, y], rows, blocks)[:, :n]

    everything = products(0, ROWS[-1])
    for rows in ROWS:
        assert products(0, rows).tobytes() == everything[:rows].tobytes(), rows
    for first in (5, 70, 149):
        assert products(first, 1).tobytes() == everything[first : first + 1].tobytes()
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    assert (np.abs(everything - exact) / size).max() < 2e-6


def test_they_are_not_those_of_the_cpu() -> None:
    rows, k, n = 40, 550, 64
    x, w = pack_activations(random_bf16(1, rows, k)), pack(random_bf16(2, n, k), "bf16")
    y = np.zeros((rows, n), np.float32)
    cpu, expected = context_of(ISA, DTYPES), aligned(y)
    kernel = GemmKernel("g", k, n)
    run(ISA, kernel.emit(cpu), "g", [x, w, expected], [rows], (0, n // 32 * -(-rows // cpu.rows_per_item)))
    fast = launched(gpu_kernel(kernel, fast_context()), [x, w, y], rows, n // 32)
    assert np.allclose(fast, expected, rtol=0, atol=1e-4)
    assert not np.array_equal(fast, expected)


def test_epilogues_get_products_of_every_number_of_rows() -> None:
    rows, k, n = 37, 96, 160
    x, w = random_bf16(3, rows, k), pack(random_bf16(4, n, k), "bf16")
    kernel = gpu_kernel(GemmKernel("g", k, n, "gate", activation="silu"), fast_context())

    def gated(first: int, count: int) -> Array:
        y = pack_activations(np.zeros((count, n // 2), np.float32))
        y = launched(kernel, [pack_activations(x[first : first + count]), w, y], count, n // 32)
        return unpack_activations(y, (count, n // 2))

    everything = gated(0, rows)
    for first, count in ((0, 5), (5, 1), (6, 31)):
        assert np.array_equal(gated(first, count), everything[first : first + count])


def test_products_of_heads() -> None:
    rows, heads, k, n = 37, 3, 64, 96
    x, w = random_bf16(5, rows, heads * k), pack(random_bf16(6, heads * n, k), "bf16")
    kernel = gpu_kernel(HeadLinearKernel("h", heads, k, n), fast_context())

    def products(count: int) -> Array:
        y = pack_activations(np.zeros((count, heads * n), np.float32))
        y = launched(kernel, [pack_activations(x[:count]), w, y], count, heads * n // 32)
        return unpack_activations(y, (count, heads * n))

    everything = products(rows)
    assert np.array_equal(products(3), everything[:3])
    of_head = (x[:, k : 2 * k] @ w_of(w, heads * n, k)[n : 2 * n].T)[:, :n]
    assert np.allclose(everything[:, n : 2 * n], of_head, rtol=1e-2, atol=1e-2)


def w_of(packed: Array, n: int, k: int) -> Array:
    """Return packed bf16 weights as f32 [n, k]."""
    blocks = (packed.astype(np.uint32) << 16).view(np.float32)  # n block, k block, tile, pair, n, parity
    return blocks.transpose(0, 2, 4, 1, 3, 5).reshape(n, k)


def outputs(model: Path, chunk: int, **options: object) -> greedy_steps.Outputs:
    loading = LoadOptions(
        str(model),
        dtype="bfloat16",
        num_pages=64,
        threads=2,
        max_num_batched_tokens=chunk,
        **options,  # type: ignore[arg-type]
    )
    return greedy_steps.generate(loading, (1, 17, 70))


@pytest.mark.parametrize(("chunk", "formats"), [(7, {}), (30, {"quantization": "int8"})], ids=str)
def test_a_model_has_the_same_bits_in_any_chunks(demo_model: Path, chunk: int, formats: dict[str, str]) -> None:
    whole, parts = (outputs(demo_model, size, device="cuda", fast_matmul=True, **formats) for size in (512, chunk))
    assert parts == whole


def test_its_kv_is_that_of_one_kind_of_gpu(demo_model: Path) -> None:
    def names(*, fast: bool) -> list[str]:
        plan, _ = describe(LoadOptions(str(demo_model), dtype="bfloat16", device="cuda:sm_90", fast_matmul=fast))
        return [name(plan, product) for name in (kv_format, model_name) for product in ("one GPU", "another", "")]

    exact, fast = names(fast=False), names(fast=True)
    assert len(set(exact)) == 2
    assert len(set(fast)) == 6
    assert not set(exact) & set(fast)


def test_quantized_weights_have_the_bits_of_the_cpu_anyway(demo_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact, fast = (
        LoadOptions(str(demo_model), dtype="bfloat16", quantization="int8", device="cuda:sm_90", fast_matmul=fast)
        for fast in (False, True)
    )
    plan, other = describe(exact)[0], describe(fast)[0]
    assert not other.context.fast_matmul
    assert kv_format(plan, "one GPU") == kv_format(other, "another")
    assert caplog.messages == [
        "fast_matmul has no effect: all weights are quantized, whose products are exact as they are"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu"}, "fast_matmul multiplies on tensor cores, and device is cpu"),
        ({"device": "cuda", "dtype": "float32"}, "fast_matmul multiplies bfloat16, and .* float32; give the dtype"),
    ],
)
def test_what_cannot_be_fast_is_an_error(demo_model: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        describe(LoadOptions(str(demo_model), fast_matmul=True, **options))  # type: ignore[arg-type]
