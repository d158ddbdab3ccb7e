"""The importance of inputs, measured by a trial run: what it is, its bits, and that every kind of model has one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.kernels.host import available_isas
from quire.kernels.models import build_graph
from quire.kernels.operands import Matrix
from quire.kernels.options import LoadOptions
from quire.kernels.runner import config_of, describe
from quire.kernels.trial import NUM_TOKENS, chosen_places, measure_importance, sampled_rows
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.loader import Importance


def measure(folder: Path, **options: Any) -> Importance:
    chosen = LoadOptions(str(folder), **options)
    checkpoint = open_checkpoint(chosen.model)
    return measure_importance(chosen, checkpoint, build_graph(config_of(chosen, checkpoint)))


def test_importance_is_the_mean_square_of_inputs(demo_model: Path) -> None:
    """The inputs of the first layer are the normed embeddings of the trial's tokens."""
    checkpoint = open_checkpoint(str(demo_model))
    embedding = checkpoint.get("model.embed_tokens.weight", (2048, 256)).to_f32()
    rows = np.concatenate([np.arange(first, first + 16) for first in sampled_rows(2048)])
    hidden = embedding[rows[chosen_places(NUM_TOKENS, len(rows))]].astype(np.float64)
    norm = checkpoint.get("model.layers.0.input_layernorm.weight", (256,)).to_f32()
    inputs = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-6) * norm
    found = measure(demo_model)["model.layers.0.self_attn.v_proj.weight", 0]
    np.testing.assert_allclose(found, (inputs**2).mean(axis=0), rtol=0.01)


@pytest.mark.parametrize("vocab_size", [16, 503, 1024, 1025, 2048, 151936])
def test_tokens_come_from_the_vocabulary(vocab_size: int) -> None:
    rows = sampled_rows(vocab_size)
    assert rows[0] == 0
    assert all(first >= before + 16 or vocab_size < 2048 for before, first in itertools.pairwise(rows))
    assert rows[-1] < vocab_size <= rows[-1] + 16
    places = chosen_places(NUM_TOKENS, min(vocab_size, 1024))
    assert len({*map(int, places)}) >= min(vocab_size, NUM_TOKENS) // 2
    assert places.min() >= 0
    assert places.max() < min(vocab_size, 1024)


def test_same_bits_on_all_hosts(demo_model: Path) -> None:
    expected = measure(demo_model, threads=1)
    for isa in available_isas():
        found = measure(demo_model, threads=2, isa=isa)
        assert found.keys() == expected.keys()
        assert all((values == expected[key]).all() for key, values in found.items())


@pytest.mark.parametrize(
    "name",
    ["gpt2-untied", "gemma3-window100", "qwen2-moe-shared-window", "gpt-oss-window100", "deepseek3-experts-yarn"],
)
def test_all_quantized_layers_are_measured(name: str, checkpoints: Path) -> None:
    importance = measure(checkpoints / name)
    plan, _ = describe(LoadOptions(str(checkpoints / name), quantization="int4"))
    parts = [
        part for matrix in plan.weights if isinstance(matrix, Matrix) and matrix.quantized for part in matrix.parts
    ]
    assert parts
    for part in parts:
        values = importance[part.tensor, part.first_k]
        assert values.shape == (part.k,)
        assert np.isfinite(values).all()
        assert values.max() > 0
