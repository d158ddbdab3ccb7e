"""Norms of changed weights (DoRA): in a fixed order, of weights in any format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_gguf
from kernel_calls import Array, to_bf16
from quantized_checkpoints import RECIPES, Recipe, write_quantized
from tiny_model import write

from quire.frontend.hub.resolve import resolve_model
from quire.kernels._native import MatrixView
from quire.kernels.adapted import AdaptedProduct
from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.packing import pack_adapter
from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import Dtypes
from quire.kernels.operands import Buffer, Matrix, MatrixPart
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.quantization import Quantization, choose_quantization
from quire.kernels.weights.tensor import Tensor

SHAPES = [(37, 3000, 16), (1, 1025, 64), (300, 33, 1), (97, 257, 5), (6, 16, 300)]
"""Outputs, inputs and ranks."""


def tensor_of(values: Array) -> Tensor:
    return Tensor("", "f32", values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def arrays(outputs: int, inputs: int, rank: int) -> tuple[Array, Array, Array]:
    """Return random weights, B and A."""
    random, shapes = np.random.default_rng(9), ((outputs, inputs), (outputs, rank), (rank, inputs))
    weights, b, a = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return weights, b, a


def expected(weights: Array, b: Array, a: Array) -> Array:
    """Return the norms of the rows of W + B A in the documented order; a long double holds each sum to be rounded."""
    change = np.zeros(weights.shape, np.float32)
    for each in range(len(a)):
        product = b[:, each : each + 1].astype(np.longdouble) * a[each].astype(np.longdouble)
        change = (product + change).astype(np.float32)
    squares = np.square((weights + change).astype(np.float64))
    sums = np.zeros((len(weights), 16))
    for k in range(squares.shape[1]):
        sums[:, k % 16] += squares[:, k]
    halves = (sums[:, 0:4] + sums[:, 8:12]) + (sums[:, 4:8] + sums[:, 12:16])
    total: Array = np.sqrt((halves[:, 0] + halves[:, 2]) + (halves[:, 1] + halves[:, 3])).astype(np.float32)
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_have_the_documented_order(shape: tuple[int, int, int]) -> None:
    """So that all hosts have the same bits, and the digest of an adapter stands for them."""
    weights, b, a = arrays(*shape)
    n, k = weights.shape
    view = MatrixView(weights.reshape(-1).view(np.uint8), "f32", n, k, k, 1)
    norms = view.changed_norms(b, a)
    assert norms.tobytes() == expected(weights, b, a).tobytes()
    exact = np.linalg.norm(weights + b.astype(np.float64) @ a, axis=1)
    np.testing.assert_allclose(norms, exact, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_norm_in_any_form_and_company(shape: tuple[int, int, int]) -> None:
    weights, b, a = arrays(*shape)
    n, k = weights.shape
    for form, values, stored in (
        ("bf16", to_bf16(weights), (to_bf16(weights).view(np.uint32) >> 16).astype(np.uint16)),
        ("f16", weights.astype(np.float16).astype(np.float32), weights.astype(np.float16)),
        ("f32", weights, weights),
    ):
        norms = expected(values, b, a)
        view = MatrixView(stored.reshape(-1).view(np.uint8), form, n, k, k, 1)
        assert view.changed_norms(b, a).tobytes() == norms.tobytes()
        columns = MatrixView(np.ascontiguousarray(stored.T).reshape(-1).view(np.uint8), form, n, k, 1, n)
        assert columns.changed_norms(b, a).tobytes() == norms.tobytes()
        last = MatrixView(stored[-1].view(np.uint8), form, 1, k, k, 1)
        assert last.changed_norms(np.ascontiguousarray(b[-1:]), a).tobytes() == norms[-1:].tobytes()


def test_denormals_count_as_zero() -> None:
    tiny = np.full((1, 16), 1e-40, np.float32)
    view = MatrixView(tiny.reshape(-1).view(np.uint8), "f32", 1, 16, 16, 1)
    assert view.changed_norms(np.ones((1, 1), np.float32), tiny) == [0.0]
    assert view.changed_norms(np.full((1, 1), 1e-20, np.float32), np.full((1, 16), 1e-20, np.float32)) == [0.0]


def test_changes_of_other_shapes_are_rejected() -> None:
    view = MatrixView(np.zeros(3 * 8 * 4, np.uint8), "f32", 3, 8, 8, 1)
    for b, a in (((2, 1), (1, 8)), ((3, 2), (1, 8)), ((3, 1), (1, 7))):
        with pytest.raises(ValueError, match=r"a change of .* of weights of n=3, k=8"):
            view.changed_norms(np.ones(b, np.float32), np.ones(a, np.float32))


def has_factors(quantization: Quantization, name: str, weights: Array) -> bool:
    """Return whether an adapter with magnitudes of a layer's second half of rows is packed by the norms of these."""
    (n, k), half = weights.shape, len(weights) // 2
    part = MatrixPart(name, half, k, first=half, tensor_n=n)
    product = AdaptedProduct(Buffer("table"), Buffer("short"), Matrix((part,), half, k), 1)
    _, b, a = arrays(n, k, 4)
    magnitude = np.arange(1, n + 1, dtype=np.float32)
    layer = LowRank(tensor_of(a), tensor_of(b), 0.7, None, magnitude)
    packed = pack_adapter([product], Adapter({name: layer}), Dtypes("f32", "f32", "f32"), quantization).memory
    assert isinstance(packed, np.ndarray)
    factors = (magnitude / expected(weights, np.float32(0.7) * b, a))[half:]
    return factors.tobytes() in packed.tobytes()


def opened(folder: Path) -> Quantization:
    """Return a model folder."""
    checkpoint = open_checkpoint(str(folder))
    return choose_quantization(None, checkpoint, ModelConfig(checkpoint.config))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_quantized_weights_have_the_norms_of_what_they_stand_for(recipe: Recipe, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    source = write(tmp_path / "floats", {name: arrays(128, 256, 4)[0]})
    assert has_factors(opened(source), name, arrays(128, 256, 4)[0])
    weights = write_quantized(source, tmp_path / "quantized", recipe)
    assert has_factors(opened(tmp_path / "quantized"), name, weights[name])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("layer", ["self_attn.q_proj", "mlp.up_proj"])
def test_gguf_weights_have_the_norms_of_what_they_stand_for(
    kind: str, layer: str, demo_model: Path, tmp_path: Path
) -> None:
    """Also those whose rows are in another order."""
    held = write_gguf(demo_model, tmp_path / "tales.gguf", kind)
    quantization = opened(Path(resolve_model(str(tmp_path / "tales.gguf"))))
    name = f"model.layers.1.{layer}.weight"
    assert has_factors(quantization, name, held[name])
