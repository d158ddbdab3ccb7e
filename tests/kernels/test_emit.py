"""Emitted kernels against numpy in float64, and against each other bit by bit."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import soft_tiles
from kernel_calls import (
    Array,
    CompiledKernel,
    aligned,
    context_of,
    pack,
    pack_activations,
    run,
    to_bf16,
    unpack_activations,
)

from quire.kernels.activations import ACTIVATIONS
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.gemm import STRIPE_BLOCKS, GemmKernel
from quire.kernels.emit.layout import PAIRED, Dtypes
from quire.kernels.emit.rows import NormKernel

erf = np.vectorize(math.erf)

FORMATS = {"bf16": Dtypes("bf16", "bf16", "f32"), "f32": Dtypes("f32", "f32", "f32")}
ISAS = [isa for isa in available_isas() if isa != "amx"]
IN_SOFTWARE = [("avx512-bf16", "pairs"), *itertools.product(["neon"], FORMATS)] if soft_tiles.IN_SOFTWARE else []
"""What x86 computes in software, where it has to."""
REFERENCES = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def inputs(m: int, k: int, n: int, form: str) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(m * 1000 + k + n)
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
    if form == "bf16":
        x, w = to_bf16(x), to_bf16(w)
    return x, w, rng.standard_normal(n, np.float32)


def contract(x: Array, w: Array) -> Array:
    """The numeric contract, literally: FMA chains over even and odd k of each block of 32, emulated in float64.

    A product of two f32 is exact in float64, and so, for these magnitudes nearly always, is its sum with an f32:
    rounding that to f32 is what FMA does.
    """
    m, k = x.shape
    total = np.zeros((m, w.shape[0]), np.float32)
    for block in range(0, k, 32):
        chains = []
        for parity in range(2):
            chain = np.zeros_like(total)
            for i in range(block + parity, min(block + 32, k), 2):
                product = x[:, i, None].astype(np.float64) * w[None, :, i].astype(np.float64)
                chain = (product + chain).astype(np.float32)
            chains.append(chain)
        total = total + (chains[0] + chains[1])
    return total


@pytest.mark.parametrize(("isa", "form"), [*itertools.product(ISAS, FORMATS), *IN_SOFTWARE])
@pytest.mark.parametrize(("k", "n"), [(32, 80), (400, 33), (96, 64)])
def test_gemm_adds_in_the_order_of_the_contract(isa: str, form: str, k: int, n: int) -> None:
    dtypes = Dtypes("bf16", "bf16", PAIRED) if form == "pairs" else FORMATS[form]
    form = dtypes.weights
    x, w, bias = inputs(70, k, n, form)
    width = -(-n // 32) * 32
    padded = aligned(np.pad(bias, (0, width - n)))
    text = GemmKernel("g", k, n, "store", bias=True).emit(context_of(isa, dtypes))
    if isa not in ISAS:
        isa, text = "avx2", soft_tiles.software(text)
    kernel, weights, expected = CompiledKernel(isa, text, "g"), pack(w, form), contract(x, w) + bias
    for m in (1, 3, 7, 70):
        y = aligned(np.full((m, width), np.nan, np.float32))
        kernel.run(
            [pack_activations(x[:m], dtypes.activations), weights, y, padded], [m], (0, width // 32 * -(-m // 64))
        )
        if form == "bf16":  # products are exact in f32, so the emulation is exact
            assert np.array_equal(y[:, :n], expected[:m])
        np.testing.assert_allclose(y[:, :n], expected[:m], rtol=1e-5, atol=1e-4)
        assert not y[:, n:].any()


UNITS = [
    *itertools.product(ISAS, FORMATS),
    *IN_SOFTWARE,
    *([("avx512-bf16", "paired"), ("amx", "tiles")] if soft_tiles.IN_SOFTWARE else []),
]
UNIT_FORMATS = {
    "pairs": Dtypes("bf16", "bf16", PAIRED), "paired": Dtypes(PAIRED, "bf16", PAIRED),
    "tiles": Dtypes("bf16", "bf16", "bf16"), **FORMATS,
}  # fmt: skip


@pytest.mark.parametrize(("isa", "form"), UNITS)
def test_rows_do_not_depend_on_the_rows_computed_with_them(isa: str, form: str, tmp_path: Path) -> None:
    dtypes = UNIT_FORMATS[form]
    k, n = 550, 32
    counts = [*range(1, 18), 63, 64, 65, 127, 150, *((255, 257, 289, 300) if form == "tiles" else ())]
    x, w, _ = inputs(counts[-1], k, n, dtypes.rounding)
    text = GemmKernel("g", k, n).emit(context_of(isa, dtypes))
    if isa not in ISAS:
        soft_tiles.load_library(tmp_path)
        isa, text = "avx2", soft_tiles.software(text)
    kernel, weights, expected = CompiledKernel(isa, text, "g"), pack(w, dtypes.weights), contract(x, w)
    if form == "f32":  # the emulation may round twice
        each = [rows_of(kernel, x[i : i + 1], weights, dtypes) for i in range(len(x))]
        np.testing.assert_allclose(np.concatenate(each), expected, rtol=1e-5, atol=1e-4)
        expected = np.concatenate(each)
    for m in counts:
        assert np.array_equal(rows_of(kernel, x[:m], weights, dtypes), expected[:m]), f"{m} rows"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("blocks", [1, STRIPE_BLOCKS - 1, STRIPE_BLOCKS, 2 * STRIPE_BLOCKS + 3])
def test_each_item_is_another_block_of_columns_or_group_of_rows(isa: str, blocks: int) -> None:
    k, n, size = 32, 32 * blocks, context_of(isa, FORMATS["f32"]).rows_per_item
    random = np.random.default_rng(blocks)
    x, w = (random.integers(-3, 4, (rows, k)).astype(np.float32) for rows in (3 * size + 5, n))
    kernel = CompiledKernel(isa, GemmKernel("g", k, n, "add").emit(context_of(isa, FORMATS["f32"])), "g")
    weights = pack(w, "f32")
    for rows in (1, size, size + 1, len(x)):
        y = aligned(np.zeros((rows, n), np.float32))
        for item in random.permutation(blocks * -(-rows // size)).tolist():
            kernel.run([pack_activations(x[:rows]), weights, y], [rows], (item, item + 1))
        assert np.array_equal(y, x[:rows] @ w.T)


def rows_of(kernel: CompiledKernel, x: Array, weights: Array, dtypes: Dtypes) -> Array:
    """Return all rows of x times 32 packed columns."""
    y = aligned(np.full((len(x), 32), np.nan, np.float32))
    items = -(-len(x) // context_of(ISAS[0], dtypes).rows_per_item)
    kernel.run([pack_activations(x, dtypes.activations), weights, y], [len(x)], (0, items))
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", REFERENCES)
def test_gate_and_activation(isa: str, name: str) -> None:
    m, k, n = 5, 64, 48
    x, gate, bias = inputs(m, k, n, "f32")
    up = inputs(m, k, n, "f32")[1][::-1].copy()
    context = context_of(isa, FORMATS["f32"])
    y = pack_activations(np.zeros((m, n), np.float32))
    text = GemmKernel("a", k, n, "activation", bias=True, activation=name).emit(context)
    run(isa, text, "a", [pack_activations(x), pack(gate, "f32"), y, aligned(np.pad(bias, (0, 16)))], [m], (0, 2))
    x64, gate64, up64 = (a.astype(np.float64) for a in (x, gate, up))
    expected = REFERENCES[name](x64 @ gate64.T + bias)
    np.testing.assert_allclose(unpack_activations(y, (m, n)), expected, rtol=2e-5, atol=2e-5)

    both = np.stack([gate.reshape(3, 16, k), up.reshape(3, 16, k)], axis=1).reshape(2 * n, k)
    y = pack_activations(np.zeros((m, n), np.float32))
    run(
        isa,
        GemmKernel("g", k, 2 * n, "gate", activation=name).emit(context),
        "g",
        [pack_activations(x), pack(both, "f32"), y],
        [m],
        (0, 3),
    )
    expected = REFERENCES[name](x64 @ gate64.T) * (x64 @ up64.T)
    np.testing.assert_allclose(unpack_activations(y, (m, n)), expected, rtol=1e-4, atol=1e-4)


def test_every_activation_has_a_reference() -> None:
    assert set(ACTIVATIONS.values()) == {ACTIVATIONS[n] for n in REFERENCES}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("output", ["activations", "rows", "residual"])
def test_norm(isa: str, kind: Literal["rms", "layer"], output: Literal["activations", "rows", "residual"]) -> None:
    m, width = 6, 80
    rng = np.random.default_rng(1)
    x = rng.standard_normal((m, width), np.float32) * 3 + 1
    weight, bias = rng.standard_normal((2, width), np.float32)
    hidden = aligned(np.pad(x, ((0, 0), (0, 16)), constant_values=np.nan))
    rows = np.array([4, 0, 5], np.int32)
    ones = np.ones((3, width + (16 if output == "residual" else 0)), np.float32)
    out = pack_activations(ones) if output == "activations" else aligned(ones)
    kernel = NormKernel("n", width, 1e-5, kind, bias=True, gather=True, output=output, scale=0.5)
    text = kernel.emit(context_of(isa, FORMATS["f32"]))
    run(isa, text, "n", [hidden, aligned(weight), out, aligned(bias), rows], [], (0, 3))
    picked = x[rows].astype(np.float64)
    centered = picked - picked.mean(1, keepdims=True) if kind == "layer" else picked
    expected = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5) * weight + bias
    if output == "residual":
        out, expected = out[:, :width], 1 + 0.5 * expected
    result = unpack_activations(out, (3, width)) if output == "activations" else out
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cap", [0.0, 2.5])
@pytest.mark.parametrize("epilogue", ["store", "add"])
def test_scale_and_softcap_of_a_product(isa: str, cap: float, epilogue: str) -> None:
    m, k, n = 3, 64, 48
    x, w, _ = inputs(m, k, n, "f32")
    y = aligned(np.ones((m, 64), np.float32))
    text = GemmKernel("g", k, n, epilogue, scale=0.25, softcap=cap).emit(context_of(isa, FORMATS["f32"]))
    run(isa, text, "g", [pack_activations(x), pack(w, "f32"), y], [m], (0, 2))
    expected = 0.25 * (x.astype(np.float64) @ w.T)
    expected = cap * np.tanh(expected / cap) if cap else expected
    np.testing.assert_allclose(y[:, :n], expected + (epilogue == "add"), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtypes", [*FORMATS.values(), UNIT_FORMATS["paired"]], ids=["bf16", "f32", "paired"])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_embedding_reads_rows_of_the_packed_matrix(isa: str, dtypes: Dtypes, scale: float) -> None:
    vocab, hidden = 101, 48
    table = to_bf16(np.random.default_rng(2).standard_normal((vocab, hidden), np.float32))
    positions = np.random.default_rng(3).standard_normal((9, hidden), np.float32)
    ids, places = np.array([0, 100, 17, 33], np.int32), np.array([8, 0, 3, 1], np.int32)
    out = aligned(np.full((4, 64), np.nan, np.float32))
    text = EmbeddingKernel("e", hidden, positions=True, scale=scale).emit(context_of(isa, dtypes))
    run(isa, text, "e", [ids, pack(table, dtypes.weights), out, places, aligned(positions)], [], (0, 4))
    assert np.array_equal(out[:, :hidden], scale * table[ids] + positions[places])
    assert not out[:, hidden:].any()
