"""Products whose rows have adapters: each row gets what its own adapter changes, whatever the others have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_calls import Array, aligned, context_of, pack, pack_activations, run, to_bf16

from quire.kernels._native import MatrixView
from quire.kernels.adapted import AdaptedExperts, AdaptedProduct
from quire.kernels.adapters import packed_products
from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.packed_products import ProductPacking
from quire.kernels.adapters.packing import PackedAdapter, pack_adapter
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.adapters import ENTRY_BYTES, rows_at_once
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import PAIRED, Dtypes
from quire.kernels.emit.shrink import SHRUNK_ROWS, ShrinkKernel
from quire.kernels.errors import ModelError
from quire.kernels.operands import Buffer, Matrix, MatrixPart
from quire.kernels.weights.quantization import Quantization
from quire.kernels.weights.tensor import Tensor

K, SIZES, TILES = 600, (48, 30), 5
RANKS = {"small": (3, 1), "large": (20, 33), "first": (8, 0), "trained": (4, 4)}
"""Ranks of each adapter in the two layers of the product."""
DTYPES = {
    "f32": Dtypes("f32", "f32", "f32"),
    "bf16": Dtypes("bf16", "bf16", "f32"),
    "paired": Dtypes(PAIRED, "bf16", PAIRED),
    "tiles": Dtypes("bf16", "bf16", "bf16"),
}
NEEDS = {"paired": "avx512-bf16", "tiles": "amx"}
CASES = [(isa, form) for isa in available_isas() for form in DTYPES if NEEDS.get(form, isa) == isa]
ROWS = 23
CHOICES = {
    "any": [int(number) for number in np.random.default_rng(3).integers(0, 1 + len(RANKS), ROWS)],
    "one": [2] * ROWS,
    "runs": [1] * 9 + [4] * 6 + [0] * 4 + [3] * 4,
}
"""Adapters of rows, each in turn, for all, or for rows that follow one another."""


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


def base_of(tensors: dict[str, Array]) -> Quantization:
    """Return a model of float tensors."""
    checkpoint: Any = Base(tensors)
    return Quantization(checkpoint)


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
        base = base_of({"one": weights[: SIZES[0]], "two": weights[SIZES[0] :]})
        self.packed: list[PackedAdapter] = [
            pack_adapter([product()], Adapter(layers), dtypes, base) for layers in self.layers
        ]
        self.table = aligned(
            np.stack([np.zeros(ENTRY_BYTES // 8, np.int64), *(each.entries[0] for each in self.packed)])
        )

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
    shrink = ShrinkKernel("s", K, TILES, rows=rows_at_once(isa, SHRUNK_ROWS))
    items = -(-m // shrink.rows) * TILES
    run(isa, shrink.emit(context), "s", [packed, rows, adapters.table, short], [m], (0, items))
    y = aligned(np.zeros((m, 96), np.float32))
    kernel = GemmKernel("g", K, n, adapter_tiles=TILES)
    weights = pack(adapters.weights, dtypes.weights)
    run(isa, kernel.emit(context), "g", [packed, weights, y, rows, adapters.table, short], [m], (0, 3))
    return y[:, :n]


@pytest.mark.parametrize(("isa", "form"), CASES)
def test_rows_get_what_their_own_adapters_change(isa: str, form: str) -> None:
    dtypes = DTYPES[form]
    random = np.random.default_rng(3)
    x, weights = (to_bf16(random.standard_normal((size, K)).astype(np.float32)) for size in (ROWS, sum(SIZES)))
    adapters = Adapters(weights, dtypes)
    alone = [
        np.stack([products(isa, dtypes, row[None], adapters, [number])[0] for row in x])
        for number in range(1 + len(RANKS))
    ]
    rtol, atol = (1e-4, 1e-3) if form == "f32" else (1e-2, 0.5)
    for number, found in enumerate(alone):
        np.testing.assert_allclose(found, adapters.changed(x, number), rtol=rtol, atol=atol)
    for chosen in CHOICES.values():
        found = products(isa, dtypes, x, adapters, chosen)
        assert found.tobytes() == np.stack([alone[number][i] for i, number in enumerate(chosen)]).tobytes()
    y = aligned(np.zeros((ROWS, 96), np.float32))
    text = GemmKernel("g", K, sum(SIZES)).emit(context_of(isa, dtypes))
    run(isa, text, "g", [pack_activations(x, dtypes.activations), pack(weights, dtypes.weights), y], [ROWS], (0, 3))
    assert alone[0].tobytes() == y[:, : sum(SIZES)].tobytes()


def packed(dtypes: Dtypes, weights: Array, **changes: Any) -> PackedAdapter:
    """Pack an adapter of the first layer, with other values of some fields."""
    random = np.random.default_rng(7)
    layer = replace(low_rank(3, SIZES[0], random, trained=False), **changes)
    base = base_of({"one": weights[: SIZES[0]], "two": weights[SIZES[0] :]})
    return pack_adapter([product()], Adapter({"one": layer}), dtypes, base)


@pytest.mark.parametrize(
    ("form", "value", "is_finite"),
    [("f32", 3.4e38, True), ("bf16", 3.4e38, False), ("bf16", 3.395e38, True), ("bf16", -3.4e38, False)],
)
@pytest.mark.parametrize("part", ["stored_a", "stored_b"])
def test_values_that_are_infinite_once_packed_are_rejected(part: str, form: str, value: float, is_finite: bool) -> None:
    weights = np.ones((sum(SIZES), K), np.float32)
    values = np.zeros((3, K) if part == "stored_a" else (SIZES[0], 3), np.float32)
    values[1, 2] = value
    if is_finite:
        packed(DTYPES[form], weights, **{part: tensor_of(values)})
        return
    with pytest.raises(ModelError, match=r"values up to 3\.4e\+38 in .* of one, and bf16 has none above 3\.396e\+38"):
        packed(DTYPES[form], weights, **{part: tensor_of(values)})


@pytest.mark.parametrize("magnitude", [0.0, 1.0])
def test_rows_without_a_norm_have_no_magnitude(magnitude: float) -> None:
    weights, b = np.ones((sum(SIZES), K), np.float32), np.ones((SIZES[0], 3), np.float32)
    weights[5], b[5] = 0, 0
    magnitudes = np.full(SIZES[0], magnitude, np.float32)
    with pytest.raises(ModelError, match=rf"the magnitude \(DoRA\) {magnitude} for row 5 of one, .* have the norm 0.0"):
        packed(DTYPES["f32"], weights, stored_b=tensor_of(b), magnitude=magnitudes)


def test_only_the_experts_that_an_adapter_changes_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of them."""
    random = np.random.default_rng(1)
    packed_names: list[str] = []

    class Watched(ProductPacking):
        def __init__(self, product: AdaptedProduct, *rest: Any) -> None:
            packed_names.extend(product.layers)
            super().__init__(product, *rest)

    monkeypatch.setattr(packed_products, "ProductPacking", Watched)
    parts = [MatrixPart(f"expert {number}", SIZES[0], K) for number in range(6)]
    products = [AdaptedProduct(Buffer("table"), Buffer("short"), Matrix((each,), SIZES[0], K), 1) for each in parts]
    layers = {f"expert {number}": low_rank(3, SIZES[0], random, trained=False) for number in (1, 4)}
    experts = AdaptedExperts(Buffer("table"), tuple(products))
    found = pack_adapter([experts], Adapter(layers), DTYPES["f32"], base_of({}))
    assert packed_names == [*layers]
    assert found.entries[0].reshape(6, -1).any(axis=1).tolist() == [False, True, False, False, True, False]


def test_matrices_are_packed_only_into_memory_that_has_room_for_them() -> None:
    view = MatrixView(np.zeros(20 * 6 * 4, np.uint8), "f32", 20, 6, 6, 1)
    memory = np.zeros(2 * 3 * 2 * 16 * 2, np.uint8)  # 32 columns by 3 pairs, in bf16
    assert view.pack_pairs(memory, "bf16", 3)
    for memory_, dtype, pairs, first_n, first_k in (
        (memory[:-1], "bf16", 3, 0, 0),
        (memory, "f32", 3, 0, 0),
        (memory, "bf16", 2, 0, 0),
        (memory, "bf16", 3, 13, 0),
        (memory, "bf16", 3, 0, 1),
        (memory, "bf16", 3, -1, 0),
        (memory, "bf16", 1 << 62, 0, 0),
        (memory, "f16", 3, 0, 0),
    ):
        with pytest.raises(ValueError, match=r"do not fit|give 1 or more"):
            view.pack_pairs(memory_, dtype, pairs, first_n, first_k)
