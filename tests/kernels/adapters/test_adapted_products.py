"""Products whose rows have adapters: each row gets what its own adapter changes, whatever the others have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_calls import Array, aligned, context_of, pack, pack_activations, run, to_bf16

from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.packing import PackedAdapter, pack_adapter
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.adapters import ShrinkKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.operands import AdaptedProduct, Buffer, Matrix, MatrixPart
from quire.kernels.weights.tensor import Tensor

K, SIZES, TILES = 100, (48, 30), 5
RANKS = {"small": (3, 1), "large": (20, 33), "first": (8, 0), "trained": (4, 4)}
"""Ranks of each adapter in the two layers of the product."""
DTYPES = {"f32": Dtypes("f32", "f32", "f32"), "bf16": Dtypes("bf16", "bf16", "f32")}
ISAS = [isa for isa in available_isas() if isa != "amx"]


def matrix() -> Matrix:
    parts = (MatrixPart("one", SIZES[0], K), MatrixPart("two", SIZES[1], K, first_tile=3))
    return Matrix(parts, sum(SIZES), K)


def low_rank(rank: int, outputs: int, random: np.random.Generator, *, trained: bool) -> LowRank:
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((rank, K), (outputs, rank)))
    a, b = to_bf16(a), to_bf16(b)
    more = [random.standard_normal(outputs).astype(np.float32) if trained else None for _ in range(2)]
    return LowRank(tensor_of(a), tensor_of(b), 0.5, *more)


def tensor_of(values: Array) -> Tensor:
    return Tensor("", "f32", values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def product() -> AdaptedProduct:
    return AdaptedProduct(Buffer("table"), Buffer("short"), matrix(), TILES)


class Base:
    """A checkpoint of tensors in memory."""

    def __init__(self, tensors: dict[str, Array]) -> None:
        self._tensors = tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._tensors[name].shape == shape
        return tensor_of(self._tensors[name])


class Adapters:
    """Packed adapters, and what each makes of a row of products."""

    def __init__(self, weights: Array, dtypes: Dtypes) -> None:
        random = np.random.default_rng(5)
        self.weights = weights
        self.layers = [
            {
                name: low_rank(rank, size, random, trained=key == "trained")
                for name, rank, size in zip(("one", "two"), ranks, SIZES, strict=True)
                if rank
            }
            for key, ranks in RANKS.items()
        ]
        base: Any = Base({"one": weights[: SIZES[0]], "two": weights[SIZES[0] :]})
        self.packed: list[PackedAdapter] = [
            pack_adapter([product()], Adapter(layers), dtypes, base) for layers in self.layers
        ]
        self.table = aligned(np.stack([np.zeros(4, np.int64), *(each.entries[0] for each in self.packed)]))

    def changed(self, x: Array, number: int) -> Array:
        """Return the products of rows with adapter `number`, 0 for none."""
        layers = self.layers[number - 1] if number else {}
        parts = []
        for name, weights in zip(("one", "two"), np.split(self.weights, [SIZES[0]]), strict=True):
            whole = weights.astype(np.float64)
            layer = layers.get(name)
            if layer is not None:
                whole = whole + layer.scale * (layer.b.astype(np.float64) @ layer.a)
                if layer.magnitude is not None:
                    whole *= (layer.magnitude / np.linalg.norm(whole, axis=1))[:, None]
            y = x.astype(np.float64) @ whole.T
            parts.append(y if layer is None or layer.bias is None else y + layer.bias)
        return np.concatenate(parts, axis=1)


def products(isa: str, dtypes: Dtypes, x: Array, adapters: Adapters, chosen: list[int]) -> Array:
    context, m, n = context_of(isa, dtypes), len(x), sum(SIZES)
    rows, packed = np.array(chosen, np.int32), pack_activations(x, dtypes.activations)
    short = aligned(np.full((m, TILES * 16), np.nan, np.float32))
    shrink = ShrinkKernel("s", K, TILES)
    run(isa, shrink.emit(context), "s", [packed, rows, adapters.table, short], [m], (0, m * TILES))
    y = aligned(np.zeros((m, 96), np.float32))
    kernel = GemmKernel("g", K, n, adapter_tiles=TILES)
    weights = pack(adapters.weights, dtypes.weights)
    run(isa, kernel.emit(context), "g", [packed, weights, y, rows, adapters.table, short], [m], (0, 3))
    return y[:, :n]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", DTYPES)
def test_rows_get_what_their_own_adapters_change(isa: str, form: str) -> None:
    dtypes = DTYPES[form]
    random = np.random.default_rng(3)
    x, weights = (to_bf16(random.standard_normal((size, K)).astype(np.float32)) for size in (23, sum(SIZES)))
    adapters = Adapters(weights, dtypes)
    chosen = [int(number) for number in random.integers(0, 1 + len(RANKS), len(x))]
    found = products(isa, dtypes, x, adapters, chosen)
    expected = np.stack([adapters.changed(x[i : i + 1], number)[0] for i, number in enumerate(chosen)])
    np.testing.assert_allclose(
        found, expected, rtol=1e-4 if form == "f32" else 1e-2, atol=1e-3 if form == "f32" else 0.1
    )
    alone = [products(isa, dtypes, x[i : i + 1], adapters, [number])[0] for i, number in enumerate(chosen)]
    assert np.array_equal(found, np.stack(alone))
    base, y = products(isa, dtypes, x, adapters, [0] * len(x)), aligned(np.zeros((len(x), 96), np.float32))
    text = GemmKernel("g", K, sum(SIZES)).emit(context_of(isa, dtypes))
    run(isa, text, "g", [pack_activations(x), pack(weights, dtypes.weights), y], [len(x)], (0, 3))
    assert base.tobytes() == y[:, : sum(SIZES)].tobytes()
