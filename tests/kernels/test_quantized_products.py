"""Quantized products against exact arithmetic, and against each other on every instruction set."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt
import pytest
import soft_tiles
from kernel_calls import (
    Array,
    CompiledKernel,
    aligned,
    context_of,
    pack_activations,
    pack_quantized,
    pack_quantized_activations,
    run,
    to_bf16,
)

from quire.kernels._native import CpuDevice, MatrixView, QuantizedWeights, ThreadPool
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import PAIRED, Dtypes, QuantizedFormat
from quire.kernels.emit.rows import NormKernel, QuantizeKernel

DTYPES = Dtypes("bf16", "bf16", "f32")
ISAS = [isa for isa in available_isas() if isa != "amx"]
FORMATS = [
    QuantizedFormat(8),
    QuantizedFormat(4),
    QuantizedFormat(8, zeros=True),
    *(QuantizedFormat(bits, group, zeros) for bits in (4, 8) for group in (32, 64, 128) for zeros in (False, True)),
]
ROTATED = [QuantizedFormat(8, group, rotated=True) for group in (32, 64, 128)]
UNITS = [*ISAS, *(isa for isa in soft_tiles.IN_SOFTWARE if isa not in ISAS)]
ROWS = (1, 3, 7, 21, 70)


class ProductCase:
    """Random operands of one product: rows x = q * sx, columns w = (values - zeros) * sw."""

    def __init__(self, form: QuantizedFormat, m: int, k: int, n: int) -> None:
        rng = np.random.default_rng(form.bits * m + k + n + form.group)
        self.form, self.shape = form, (m, k, n)
        groups = form.groups(k)
        self.values = rng.integers(0, 1 << form.bits, (n, k), np.uint8)
        self.scales = rng.uniform(1e-3, 1e-2, (n, groups)).astype(np.float16 if form.group else np.float32)
        self.zeros = rng.integers(0, (1 << form.bits) + 1, (n, groups)).astype(np.int16) if form.zeros else None
        self.q = rng.integers(-127, 128, (m, k)).astype(np.int8)
        self.x_scales = rng.uniform(1e-3, 1e-1, (m, groups)).astype(np.float32)

    @functools.cached_property
    def weights(self) -> Array:
        """The packed weights."""
        packed = pack_quantized(self.values, self.scales, self.zeros, self.form.bits, self.form.group)
        assert packed.shape[1] == self.form.block_bytes(self.shape[1])
        return packed

    @functools.cache  # noqa: B019  few cases live long
    def kernel(self, isa: str) -> CompiledKernel:
        """Return the kernel; AMX tiles, and what else the host lacks, run in software."""
        _, k, n = self.shape
        text = GemmKernel("g", k, n, quantized=self.form).emit(context_of(isa, DTYPES))
        if isa not in ISAS:
            isa, text = "avx2", soft_tiles.software(text)
        return CompiledKernel(isa, text, "g")

    def expected(self) -> Array:
        """Return f32 sums in the order of the contract; an FMA is emulated in float64."""
        (m, k, n), span = self.shape, self.form.span(self.shape[1])
        total = np.zeros((m, n), np.float32)
        for group, first in enumerate(range(0, k, span)):
            part = slice(first, first + span)
            zero = self.form.middle if self.zeros is None else self.zeros[:, group, None].astype(np.int64)
            exact = self.q[:, part].astype(np.int64) @ (self.values[:, part].astype(np.int64) - zero).T
            scale = self.scales[None, :, group].astype(np.float32) * self.x_scales[:, group, None]
            total = (exact.astype(np.float32).astype(np.float64) * scale + total).astype(np.float32)
        return total

    def run(self, isa: str, rows: int | None = None) -> Array:
        """Return the kernel's result for all rows, or the first ones."""
        m, k, n = self.shape
        m, width = rows or m, -(-n // 32) * 32
        y = aligned(np.full((m, width), np.nan, np.float32))
        x = pack_quantized_activations(self.q[:m], self.x_scales[:m], self.form.depth(k), self.form.span(k))
        assert x.shape[1] == self.form.panel_bytes(k)
        items = width // 32 * -(-m // context_of(isa, DTYPES).rows_per_item)
        self.kernel(isa).run([x, self.weights, y], [m], (0, items))
        return y[:, :n]


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> None:
    soft_tiles.load_library(tmp_path_factory.mktemp("tiles"))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("k", "n"), [(64, 32), (320, 80), (400, 33)])
def test_products_are_exact_sums_scaled_in_order(tiles: None, form: QuantizedFormat, k: int, n: int) -> None:
    case = ProductCase(form, max(ROWS), k, n)
    expected = case.expected()
    for m in ROWS:
        results = [case.run(isa, m) for isa in UNITS]
        np.testing.assert_allclose(results[0], expected[:m], rtol=2e-7, atol=1e-30)
        for isa, result in zip(UNITS, results, strict=True):
            assert np.array_equal(result, results[0]), f"{m} rows on {isa}"


def transformed(groups: Array) -> Array:
    """Return the Hadamard transforms of f32 groups [..., 2^n], in the order of the kernels' sums."""
    half = 1
    while half < groups.shape[-1]:
        pairs = groups.reshape(*groups.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        groups = np.stack([low + high, low - high], axis=-2).reshape(groups.shape)
        half *= 2
    return groups


def quantized(x: Array, form: QuantizedFormat) -> Array:
    """Quantize activations x[m, k] with numpy."""
    (m, k), depth, span = x.shape, form.depth(x.shape[1]), form.span(x.shape[1])
    groups = np.pad(x, ((0, 0), (0, form.groups(k) * span - k))).astype(np.float32).reshape(m, -1, span)
    groups = transformed(groups) if form.rotated else groups
    largest = np.abs(groups).max(2)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest < 1e-30, np.float32(0), np.float32(127) / largest)
    q = np.rint(groups * inverse[..., None]).astype(np.int8).reshape(m, -1)
    return pack_quantized_activations(
        q, np.where(largest < 1e-30, np.float32(0), largest / np.float32(127)), depth, span
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "form", [QuantizedFormat(8), QuantizedFormat(4, 32), QuantizedFormat(4, 128), *ROTATED], ids=str
)
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("k", "activations"), [(40, "f32"), (208, "f32"), (80, PAIRED)])
def test_quantize(isa: str, form: QuantizedFormat, gather: bool, k: int, activations: str) -> None:
    m = 19
    rng = np.random.default_rng(4)
    x = rng.standard_normal((m, k), np.float32) * rng.uniform(0.01, 10, (m, 1)).astype(np.float32)
    x[3], x[5, 64:] = 0, 0
    if activations == PAIRED:
        x = to_bf16(x)
    order = rng.permutation(k).astype(np.int32)
    expected = quantized(x[:, order] if gather else x, form)
    out = aligned(np.zeros_like(expected))
    text = QuantizeKernel("q", k, form, gather).emit(context_of(isa, Dtypes("bf16", "bf16", activations)))
    run(isa, text, "q", [pack_activations(x, activations), out, *([order] if gather else [])], [], (0, m))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_keeps_values_that_are_not_finite(isa: str) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 7], x[1, 9] = np.nan, np.inf
    form = QuantizedFormat(8)
    out = aligned(np.zeros((1, form.panel_bytes(64)), np.uint8))
    run(isa, QuantizeKernel("q", 64, form).emit(context_of(isa, DTYPES)), "q", [pack_activations(x), out], [], (0, 2))
    scales = out[0, 16 * 64 : 16 * 64 + 8].view(np.float32)
    assert not np.isfinite(scales).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [QuantizedFormat(8), QuantizedFormat(4, 64), *ROTATED], ids=str)
def test_norm_quantizes_as_it_stores(isa: str, form: QuantizedFormat) -> None:
    m, width = 18, 160
    hidden, weight = np.random.default_rng(6).standard_normal((2, m, width), np.float32)
    floats = pack_activations(np.zeros((m, width), np.float32))
    context = context_of(isa, Dtypes("f32", "f32", "f32"))
    run(isa, NormKernel("n", width, 1e-5).emit(context), "n", [aligned(hidden), aligned(weight[0]), floats], [], (0, m))
    apart = aligned(np.zeros((2, form.panel_bytes(width)), np.uint8))
    run(isa, QuantizeKernel("q", width, form).emit(context), "q", [floats, apart], [], (0, m))
    fused = aligned(np.zeros_like(apart))
    text = NormKernel("n", width, 1e-5, quantized=form).emit(context)
    run(isa, text, "n", [aligned(hidden), aligned(weight[0]), fused], [], (0, m))
    assert np.array_equal(fused, apart)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "form",
    [QuantizedFormat(8), QuantizedFormat(8, 32), QuantizedFormat(4, 32), QuantizedFormat(4, 128), *ROTATED],
    ids=str,
)
def test_quantized_embedding(isa: str, form: QuantizedFormat) -> None:
    """A column that is rotated has values in the padding of its last group too."""
    vocab, hidden = 101, 176
    rng = np.random.default_rng(7)
    depth = form.groups(hidden) * form.span(hidden) if form.rotated else hidden
    values = rng.integers(0, 1 << form.bits, (vocab, depth), np.uint8)
    scales = rng.random((vocab, form.groups(hidden)), np.float32).astype(np.float16).astype(np.float32)
    ids = np.array([0, 100, 17, 33], np.int32)
    out = aligned(np.zeros((4, 192), np.float32))
    packed = pack_quantized(values, scales, None, form.bits, form.group)
    run(
        isa,
        EmbeddingKernel("e", hidden, quantized=form).emit(context_of(isa, DTYPES)),
        "e",
        [ids, packed, out],
        [],
        (0, 4),
    )
    wide = np.repeat(scales, form.span(hidden), axis=1)[:, :depth]
    expected = ((values.astype(np.float32) - form.middle) * wide)[ids]
    if form.rotated:
        expected = transformed(expected.reshape(len(ids), -1, form.group)).reshape(len(ids), -1)[:, :hidden]
    assert np.array_equal(out[:, :hidden], expected)


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize(
    "form",
    [QuantizedFormat(8), QuantizedFormat(8, 32, zeros=True), *(QuantizedFormat(4, group) for group in (32, 64, 128))],
    ids=str,
)
@pytest.mark.parametrize("m", [1, 7, 23])
def test_the_largest_operands_do_not_saturate(tiles: None, isa: str, form: QuantizedFormat, m: int) -> None:
    """All scales are 1, and the sums are integers that f32 holds exactly."""
    case = ProductCase(form, m, 256, 32)
    case.values[:] = (1 << form.bits) - 1
    case.values[16:, 1::2] = 0
    case.q[::2], case.q[1::2] = -127, 127
    case.scales[:] = case.x_scales[:] = 1
    if case.zeros is not None:
        case.zeros[:] = 0
    zero = form.middle if case.zeros is None else 0
    assert np.array_equal(case.run(isa), case.q.astype(np.int64) @ (case.values.astype(np.int64) - zero).T)


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(ThreadPool(2))


def memory(address: int, size: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_quantized_weights_are_packed_as_the_layout_says(device: CpuDevice, form: QuantizedFormat) -> None:
    n, k = 50, 200
    rng = np.random.default_rng(8)
    groups = -(-k // form.span(k))
    values = rng.integers(0, 1 << form.bits, (n, k), np.uint8)
    scales = np.exp2(rng.uniform(-26, 3, (n, groups))).astype(np.float32)
    zeros = rng.integers(0, 17, (n, groups)).astype(np.int16) if form.zeros else None
    expected = pack_quantized(values, scales, zeros, form.bits, form.group)
    target = device.allocate(expected.nbytes)
    device.pack_quantized(values, scales, zeros, QuantizedWeights(target, form, k))
    # Padding is the middle of the range here and 0 in the expected array; its value does not matter.
    shape = (2, form.groups(k), form.super_bytes(k))
    packed = memory(target, expected.nbytes).reshape(shape)
    whole = slice(0, 1), slice(0, k // form.span(k))
    assert np.array_equal(packed[whole], expected.reshape(shape)[whole])


@pytest.mark.parametrize(
    "form",
    [
        QuantizedFormat(8),
        *ROTATED,
        QuantizedFormat(4, 32, scales="super", mins=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("name", "source"), [("f32", np.float32), ("f16", np.float16)])
@pytest.mark.parametrize("isa", ISAS)
def test_quantized_weights_are_near(
    device: CpuDevice, isa: str, form: QuantizedFormat, name: str, source: npt.DTypeLike
) -> None:
    """The product of the identity and the packed matrix gives the weights back."""
    n, k = 48, 192
    weights: Array = np.random.default_rng(9).standard_normal((n, k), np.float32).astype(source)
    weights[5] = 0
    target = device.allocate(2 * form.block_bytes(k))
    device.quantize(MatrixView(weights.view(np.uint8).reshape(-1), name, n, k, k, 1), QuantizedWeights(target, form, k))
    x = quantized(np.eye(k, dtype=np.float32), form)
    y = aligned(np.zeros((k, 64), np.float32))
    text = GemmKernel("g", k, n, quantized=form).emit(context_of(isa, DTYPES))
    run(isa, text, "g", [x, aligned(memory(target, 2 * form.block_bytes(k))), y], [k], (0, 2 * -(-k // 64)))
    error = y[:, :n].T - weights.astype(np.float32)
    relative = np.sqrt((error**2).sum() / (weights.astype(np.float32) ** 2).sum())
    assert relative < {8: 0.011 if form.rotated else 0.008, 4: 0.075}[form.bits]
    assert not y[:, 5].any()


def quantize_affine(device: CpuDevice, weights: Array, importance: Array | None) -> Array:
    """Return what 4-bit weights [32, 64] in groups of 32 with minima stand for."""
    form = QuantizedFormat(4, 32, scales="super", mins=True)
    target = device.allocate(form.block_bytes(64))
    view = MatrixView(weights.view(np.uint8).reshape(-1), "f32", 32, 64, 64, 1)
    device.quantize(view, QuantizedWeights(target, form, 64), importance=importance)
    x, y = quantized(np.eye(64, dtype=np.float32), form), aligned(np.zeros((64, 32), np.float32))
    text = GemmKernel("g", 64, 32, quantized=form).emit(context_of(ISAS[0], DTYPES))
    run(ISAS[0], text, "g", [x, aligned(memory(target, form.block_bytes(64))), y], [64], (0, 1))
    return y.T


def test_errors_count_by_the_importance_of_inputs(device: CpuDevice) -> None:
    weights = np.random.default_rng(3).standard_normal((32, 64), np.float32)
    importance = np.ones(64, np.float32)
    importance[[7, 40]] = 1000
    plain, weighted = ((quantize_affine(device, weights, by) - weights) ** 2 for by in (None, importance))
    assert (weighted @ importance).sum() < 0.3 * (plain @ importance).sum()
    assert weighted.sum() < 3 * plain.sum()
    alike = quantize_affine(device, weights, np.full(64, 4, np.float32))
    np.testing.assert_array_equal(alike, quantize_affine(device, weights, None))


def test_inputs_of_little_importance_are_not_lost(device: CpuDevice) -> None:
    """The trial counts inputs that were zero as a hundred-thousandth of the mean."""
    weights = np.random.default_rng(3).standard_normal((32, 64), np.float32)
    importance = np.full(64, 1e-5, np.float32)
    importance[[7, 40]] = 16
    plain, weighted = (np.abs(quantize_affine(device, weights, by) - weights) for by in (None, importance))
    assert weighted.max() < 3 * plain.max()
    assert weighted[:, [7, 40]].max() < 0.5 * plain[:, [7, 40]].max()


def test_groups_without_importance_are_quantized(device: CpuDevice) -> None:
    weights = np.random.default_rng(3).standard_normal((32, 64), np.float32)
    importance = np.zeros(64, np.float32)
    assert np.abs(quantize_affine(device, weights, importance) - weights).max() < 0.5


@pytest.mark.parametrize(
    ("form", "size", "message"),
    [
        (QuantizedFormat(4, 32, scales="super", mins=True), 63, "importance has 63 values for 64 inputs"),
        (QuantizedFormat(8, 32), 64, "the importance of inputs is for formats with super scales and minima"),
    ],
    ids=["size", "format"],
)
def test_importance_that_does_not_fit_is_refused(
    device: CpuDevice, form: QuantizedFormat, size: int, message: str
) -> None:
    view = MatrixView(np.zeros(32 * 64 * 4, np.uint8), "f32", 32, 64, 64, 1)
    target = QuantizedWeights(device.allocate(form.block_bytes(64)), form, 64)
    with pytest.raises(ValueError, match=message):
        device.quantize(view, target, importance=np.ones(size, np.float32))


def test_weights_that_are_not_finite_cannot_be_quantized(device: CpuDevice) -> None:
    weights = np.ones((16, 64), np.float32)
    weights[3, 4] = np.nan
    form = QuantizedFormat(8)
    target = QuantizedWeights(device.allocate(form.block_bytes(64)), form, 64)
    with pytest.raises(ValueError, match="weight column 3 holds a value that is not finite"):
        device.quantize(MatrixView(weights.view(np.uint8).reshape(-1), "f32", 16, 64, 64, 1), target)
