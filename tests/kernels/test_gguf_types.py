"""Every quantized type of GGUF files: random blocks against the `gguf` package, on every instruction set."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import soft_tiles
from gguf_blocks import HALVES, dequantized, random_blocks
from kernel_calls import Array, CompiledKernel, aligned, context_of, pack_quantized_activations, run

from quire.kernels._native import CpuDevice, GgufMatrix, QuantizedWeights, ThreadPool
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import Dtypes, QuantizedFormat
from quire.kernels.weights.quantized.gguf import TYPES

DTYPES = Dtypes("bf16", "bf16", "f32")
ISAS = [isa for isa in available_isas() if isa != "amx"]
ROWS = (1, 2, 3, 5, 16, 17, 40, 70)
every_type = pytest.mark.parametrize("kind", TYPES)


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    return CpuDevice(ThreadPool(2))


@pytest.fixture(scope="module")
def soft(tmp_path_factory: pytest.TempPathFactory) -> None:
    soft_tiles.load_library(tmp_path_factory.mktemp("soft"))


def packed(device: CpuDevice, kind: str, blocks: npt.NDArray[np.uint8], k: int, heads: int = 0) -> Array:
    """Return packed weights, one block of 32 columns a row."""
    form, n = QuantizedFormat.of_gguf(kind), len(blocks)
    size = -(-n // 32) * form.block_bytes(k)
    address = device.allocate(size)
    matrix = GgufMatrix(blocks.reshape(-1), kind, n, k, heads)
    device.pack_blocks(matrix, QuantizedWeights(address, form, k), 0, n)
    return aligned(np.frombuffer(ctypes.string_at(address, size), np.uint8).reshape(-1, form.block_bytes(k)))


class Products:
    """The kernel of products with packed weights; AMX tiles, and what else the host lacks, run in software."""

    def __init__(self, isa: str, kind: str, n: int, k: int) -> None:
        self._form, self._n, self._k = QuantizedFormat.of_gguf(kind), n, k
        context = context_of(isa, DTYPES)
        self._rows_per_item = context.rows_per_item
        text = GemmKernel("g", k, n, quantized=self._form).emit(context)
        if isa not in ISAS:
            isa, text = "avx2", soft_tiles.software(text)
        self._kernel = CompiledKernel(isa, text, "g")

    def run(self, q: Array, scales: Array, w: Array) -> Array:
        """Return the products of int8 activations with scales of 32 each, f32 [m, n]."""
        width, m = -(-self._n // 32) * 32, len(q)
        x = pack_quantized_activations(q, scales, self._form.depth(self._k), 32)
        y = aligned(np.full((m, width), np.nan, np.float32))
        self._kernel.run([x, w, y], [m], (0, width // 32 * -(-m // self._rows_per_item)))
        return y[:, : self._n]


@every_type
def test_dequantized_values_are_those_of_the_gguf_package(kind: str) -> None:
    blocks = random_blocks(kind, 6, 512)
    np.testing.assert_array_equal(GgufMatrix(blocks.reshape(-1), kind, 6, 512).dequantize(), dequantized(kind, blocks))
    permuted = GgufMatrix(blocks.reshape(-1), kind, 6, 512, 1).dequantize()
    np.testing.assert_array_equal(permuted, dequantized(kind, blocks)[[0, 2, 4, 1, 3, 5]])


@every_type
def test_products_are_those_of_the_values_on_every_instruction_set(kind: str, device: CpuDevice, soft: None) -> None:
    n, k, rng = 41, 768, np.random.default_rng(1)
    blocks = random_blocks(kind, n, k)
    values, w = dequantized(kind, blocks).astype(np.float64), packed(device, kind, blocks, k)
    q = rng.integers(-127, 128, (max(ROWS), k)).astype(np.int8)
    scales = rng.uniform(1e-3, 1e-1, (max(ROWS), k // 32)).astype(np.float32)
    x = q * np.repeat(scales.astype(np.float64), 32, axis=1)
    expected, magnitude = x @ values.T, np.abs(x) @ np.abs(values).T
    whole = Products(ISAS[0], kind, n, k).run(q, scales, w)
    assert np.abs(whole - expected).max() < 1e-6 * magnitude.max()
    for isa in [*ISAS, *(name for name in soft_tiles.IN_SOFTWARE if name not in ISAS)]:
        kernel = Products(isa, kind, n, k)
        for m in ROWS:
            assert np.array_equal(kernel.run(q[:m], scales[:m], w), whole[:m]), (isa, m)


@every_type
@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_embeddings_are_the_values(kind: str, isa: str, device: CpuDevice) -> None:
    n, k, form = 70, 512, QuantizedFormat.of_gguf(kind)
    blocks = random_blocks(kind, n, k)
    ids = np.array([0, 69, 31, 32, 5, 48], np.int32)
    out = aligned(np.full((len(ids), k), np.nan, np.float32))
    text = EmbeddingKernel("e", k, quantized=form).emit(context_of(isa, DTYPES))
    run(isa, text, "e", [ids, packed(device, kind, blocks, k), out], [], (0, len(ids)))
    assert np.array_equal(out, dequantized(kind, blocks)[ids])


@every_type
def test_permuted_rows_are_put_in_order(kind: str, device: CpuDevice) -> None:
    blocks = random_blocks(kind, 64, 256)
    in_order = blocks.reshape(2, 2, 16, -1).swapaxes(1, 2).reshape(64, -1)  # rows j, j + 16 of heads of 32 beside
    assert np.array_equal(packed(device, kind, in_order, 256, heads=2), packed(device, kind, blocks, 256))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "MXFP4"])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_not_finite_is_rejected(kind: str, bits: int, device: CpuDevice) -> None:
    for offset in HALVES[kind]:
        blocks = random_blocks(kind, 40, 256)
        blocks[33, offset : offset + 2] = np.array([bits], "<u2").view(np.uint8)
        with pytest.raises(ValueError, match="infinity or a NaN"):
            packed(device, kind, blocks, 256)


def test_a_scale_of_mxfp4_that_is_a_nan_is_rejected(device: CpuDevice) -> None:
    blocks = random_blocks("MXFP4", 40, 256)
    blocks[33, 17] = 255
    with pytest.raises(ValueError, match="NaN"):
        packed(device, "MXFP4", blocks, 256)


@every_type
def test_matrices_that_do_not_fit_are_rejected(kind: str, device: CpuDevice) -> None:
    blocks, form = random_blocks(kind, 32, 256).reshape(-1), QuantizedFormat.of_gguf(kind)
    with pytest.raises(ValueError, match="does not fit"):
        GgufMatrix(blocks, kind, 33, 256)
    with pytest.raises(ValueError, match="no whole blocks"):
        GgufMatrix(blocks, kind, 32, 240)
    matrix = GgufMatrix(blocks, kind, 32, 256)
    target = QuantizedWeights(device.allocate(form.block_bytes(256)), form, 256)
    for first, count in ((-1, 2), (31, 2), (0, 0)):
        with pytest.raises(ValueError, match=r"rows|columns"):
            device.pack_blocks(matrix, target, first, count)


def test_every_type_takes_about_the_bits_of_its_file() -> None:
    for kind in TYPES:
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        ours = QuantizedFormat.of_gguf(kind).block_bytes(768) * 8 / 32 / 768
        assert 0.99 < ours / (size * 8 / elements) < (1.2 if kind == "Q2_K" else 1.05), kind
