"""Rotary tables: our sine and cosine, and every scaling against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_libraries import import_reference

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.rope import Rope, sine_cosine

BASE = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256, "hidden_size": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {
        "original_max_position_embeddings": 64,
        "short_factor": [1 + 0.1 * i for i in range(32)],
        "long_factor": [4 + 0.3 * i for i in range(32)],
    },
}  # fmt: skip


def make(kind: str, **extra: Any) -> Rope:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS.get(kind, {}), **extra}
    return Rope.from_config(ModelConfig({**BASE, "rope_parameters": parameters}), 64)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("linear", {"factor": 1e-300}),
        ("yarn", {"factor": 1e-300, "original_max_position_embeddings": 1e-300}),
        ("yarn", {"beta_fast": 1e300, "original_max_position_embeddings": 1e-300}),
        ("llama3", {"factor": 1e-300, "original_max_position_embeddings": 1e-300}),
        ("yarn", {"attention_factor": 10**400}),
        ("longrope", {"original_max_position_embeddings": 1}),
        ("longrope", {"short_factor": [1.0] * 31}),
        ("longrope", {"long_factor": [1.0] * 31 + [0.0]}),
        ("longrope", {"long_factor": None}),
    ],
)
def test_numbers_that_give_no_finite_frequencies_are_rejected(kind: str, extra: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"rope scaling {kind!r}"):
        make(kind, **extra).check()


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_reach_beyond_all_numbers_is_cut(kind: str) -> None:
    assert make(kind, factor=1e300).reach == 1 << 53


def test_sine_and_cosine() -> None:
    angles = np.concatenate([np.linspace(0, 50, 10001), np.random.default_rng(0).uniform(0, 2**23, 20000)])
    sine, cosine = sine_cosine(angles)
    assert np.abs(sine - np.sin(angles)).max() < 1e-13
    assert np.abs(cosine - np.cos(angles)).max() < 1e-13


@pytest.mark.parametrize(("kind", "length"), [*((kind, 256) for kind in SCALINGS), ("longrope", 64)])
def test_tables_equal_those_of_transformers(kind: str, length: int) -> None:
    torch = import_reference("torch")
    transformers = import_reference("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=256, rope_parameters=parameters
    )
    rotary = LlamaRotaryEmbedding(config)
    table = make(kind).table(length)
    cosine, sine = rotary(torch.zeros(1), torch.arange(length)[None])
    np.testing.assert_allclose(
        table[:, 0], cosine[0, :, :32].numpy(), atol=2e-5
    )  # transformers rounds frequencies to f32
    np.testing.assert_allclose(
        table[:, 1], sine[0, :, :32].numpy(), atol=2e-5
    )  # transformers rounds frequencies to f32


def test_dynamic_positions_past_the_original_follow_token_by_token_decoding() -> None:
    torch = import_reference("torch")
    transformers = import_reference("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=256, rope_parameters=parameters
    )
    rotary = LlamaRotaryEmbedding(config)
    table = make("dynamic").table(300)
    for position in (256, 270, 299):
        cosine, _ = rotary(torch.zeros(1), torch.tensor([[position]]))
        np.testing.assert_allclose(table[position, 0], cosine[0, 0, :32].numpy(), atol=1e-5)


def test_a_part_of_the_head_is_rotated() -> None:
    config = ModelConfig({**BASE, "partial_rotary_factor": 0.25})
    assert Rope.from_config(config, 64, partial=True).dim == 16


def test_proportional_frequencies_are_those_of_the_whole_head() -> None:
    rope = Rope.from_config(
        ModelConfig({**BASE, "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}), 64
    )
    assert (rope.dim, rope.span) == (16, 64)
    np.testing.assert_array_equal(rope.frequencies(1)[0], make("default").frequencies(1)[0][:8])


def test_unsupported_fields_are_rejected_with_an_error_that_names_them() -> None:
    with pytest.raises(ModelError, match="rope_type is 'axial'; supported are default, linear, proportional, dynamic"):
        make("axial")
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5; this architecture supports only 1"):
        make("default", partial_rotary_factor=0.5)
    rope = Rope.from_config(ModelConfig({**BASE, "rope_scaling": {"type": "linear"}}), 64)
    with pytest.raises(ModelError, match="factor of rope scaling 'linear' is missing; it must be a number above 0"):
        rope.table(8)
    with pytest.raises(ModelError, match="rope_theta is 1"):
        make("yarn", rope_theta=1)
    with pytest.raises(ModelError, match=r"low_freq_factor 4\.0 must be below high_freq_factor 4\.0"):
        make("llama3", low_freq_factor=4.0).table(8)


def test_scaling_extends_the_context() -> None:
    assert [make(kind).reach for kind in SCALINGS] == [256, 1024, 512, 256, 256, 256]
