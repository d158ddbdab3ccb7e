"""Quantized models against the same models in floats, all through the runner that the engine uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quantized_checkpoints import by_name, write_dequantized, write_quantized

from quire.kernels import options, runner
from quire.kernels.errors import ModelError
from quire.kernels.step import StepInput

LENGTH = 90
ODD_SHAPES = [
    "gpt2-untied", "llama-biases-linear", "mistral-window77", "qwen3-biases-window", "gemma2-window77",
    "gemma3-window100", "phi3-long", "starcoder2-window77", "olmo2-joint-norms", "glm4-interleaved", "cohere2-window77",
    "deepseek2-experts", "deepseek3-dense-yarn", "apertus-xielu", "glm4-moe-groups",
    "hunyuan-alpha", "ministral3-growing-queries",
    "deepseek2-experts", "deepseek3-dense-yarn", "gemma4-shared-window100", "gemma4-keys-as-values",
    "gemma3n-window100",
]  # fmt: skip


def log_probabilities(model: Path, **chosen: Any) -> npt.NDArray[np.float64]:
    """Return the log probability of each token but the first of a random prompt, computed in two chunks."""
    engine = runner.load_model(options.LoadOptions(str(model), num_pages=16, threads=2, **chosen))
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, engine.vocab_size, LENGTH)]
    slot = engine.sequences.open(prompt, LENGTH, sampling=runner.SamplingConfig(temperature=0.0, prompt_logprobs=0))
    assert engine.sequences.reserve(slot, LENGTH + 1)
    values: list[float] = []
    for start, count in ((0, 50), (50, LENGTH - 50)):
        values += [entry[1][0] for entry in engine.run(StepInput([slot], [start], [count])).prompt_logprobs[0]]
    engine.sequences.close(slot)
    assert engine.sequences.free_pages == engine.num_pages
    return np.array(values)


def distance(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float:
    """Return the mean difference of two lists of log probabilities."""
    return float(np.abs(left - right).mean())


@pytest.fixture(scope="module")
def floats(demo_model: Path) -> npt.NDArray[np.float64]:
    return log_probabilities(demo_model, dtype="float32")


# Upper bounds of each mode's error. The prompt is random: each token costs 14 nats, and differences are large.
COSTS = {"int8": 0.12, "int4": 0.2}


@pytest.mark.parametrize("mode", COSTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_quantized_at_load(mode: str, kv_cache_dtype: str, demo_model: Path, floats: npt.NDArray[np.float64]) -> None:
    quantized = log_probabilities(demo_model, quantization=mode, kv_cache_dtype=kv_cache_dtype)
    assert 0.02 < distance(quantized, floats) < COSTS[mode]


def test_int8_kv(demo_model: Path, floats: npt.NDArray[np.float64]) -> None:
    assert 0.001 < distance(log_probabilities(demo_model, kv_cache_dtype="int8", dtype="float32"), floats) < 0.03


@pytest.mark.parametrize("name", ODD_SHAPES)
@pytest.mark.parametrize(("mode", "least"), [("int8", 0.99), ("int4", 0.93)])
def test_odd_shapes(name: str, mode: str, least: float, checkpoints: Path) -> None:
    """Compare correlations, since the weights are random and large and errors grow from layer to layer."""
    quantized = log_probabilities(checkpoints / name, quantization=mode, kv_cache_dtype="int8")
    floats = log_probabilities(checkpoints / name, dtype="float32")
    assert np.corrcoef(quantized, floats)[0, 1] > least


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("gptq-4", 0.06),
        ("gptq-4-asymmetric-reordered", 0.06),
        ("gptq_v2-8-reordered", 0.06),
        ("awq-group128", 0.08),
        ("pack-4-channel-asymmetric", 0.12),
        ("pack-8", 0.08),
        ("int-8", 0.1),
    ],
)
def test_quantized_checkpoints(
    name: str, most: float, demo_model: Path, tmp_path: Path, floats: npt.NDArray[np.float64]
) -> None:
    """Only the rounding of activations separates a checkpoint from its dequantized weights."""
    weights = write_quantized(demo_model, tmp_path / "quantized", by_name(name))
    write_dequantized(demo_model, tmp_path / "floats", weights)
    twin = log_probabilities(tmp_path / "floats", dtype="float32")
    assert distance(log_probabilities(tmp_path / "quantized"), twin) < most
    if "-4" in name:
        assert distance(twin, floats) > 3 * most  # the quantized weights do matter


@pytest.mark.parametrize(
    ("model", "name"), [("gpt2-tied", "gptq-4-asymmetric"), ("phi3-window90-short", "gptq-4-asymmetric-reordered")]
)
def test_quantized_transposed_and_fused_layers(model: str, name: str, checkpoints: Path, tmp_path: Path) -> None:
    weights = write_quantized(checkpoints / model, tmp_path / "quantized", by_name(name))
    write_dequantized(checkpoints / model, tmp_path / "floats", weights)
    quantized = log_probabilities(tmp_path / "quantized", dtype="float32")
    floats = log_probabilities(tmp_path / "floats", dtype="float32")
    assert np.corrcoef(quantized, floats)[0, 1] > 0.99


@pytest.mark.parametrize("model", ["qwen3-moe", "qwen2-moe-shared-window"])
@pytest.mark.parametrize("name", ["gptq-4-asymmetric", "awq", "pack-8-channel-asymmetric", "int-8"])
def test_quantized_experts(model: str, name: str, checkpoints: Path, tmp_path: Path) -> None:
    """Most tokens go to the same experts; one that rounding sends to another errs by any amount."""
    weights = write_quantized(checkpoints / model, tmp_path / "quantized", by_name(name))
    assert any(".experts.3.down_proj" in weight for weight in weights)
    write_dequantized(checkpoints / model, tmp_path / "floats", weights)
    quantized = log_probabilities(tmp_path / "quantized", dtype="float32")
    twin = log_probabilities(tmp_path / "floats", dtype="float32")
    assert np.corrcoef(quantized, twin)[0, 1] > 0.99


def rejection(model: Path, **chosen: Any) -> str:
    with pytest.raises(ModelError) as caught:
        runner.load_model(options.LoadOptions(str(model), num_pages=8, **chosen))
    return str(caught.value)


def test_modes_that_do_not_fit_the_checkpoint(demo_model: Path, tmp_path: Path) -> None:
    write_quantized(demo_model, tmp_path / "awq", by_name("awq"))
    assert "quantized by awq already; leave it out" in rejection(tmp_path / "awq", quantization="int8")
    assert "not quantized; choose one of int8, int4" in rejection(demo_model, quantization="gptq")
    assert "must be one of int8, int4, gptq" in rejection(demo_model, quantization="int2")
    assert "kv_cache_dtype is 'fp8'; it must be one of auto, int8" in rejection(demo_model, kv_cache_dtype="fp8")
    runner.load_model(options.LoadOptions(str(tmp_path / "awq"), num_pages=8, quantization="awq"))


def test_quantized_layers_that_latent_attention_takes_apart_are_rejected(checkpoints: Path, tmp_path: Path) -> None:
    write_quantized(checkpoints / "deepseek2-dense", tmp_path / "quantized", by_name("gptq-4-asymmetric"))
    message = rejection(tmp_path / "quantized")
    assert "model.layers.0.self_attn.kv_b_proj.weight is quantized by gptq" in message
    assert "quantize the checkpoint without its kv_b_proj layers" in message


def test_gate_and_up_may_have_different_formats(demo_model: Path, tmp_path: Path) -> None:
    floats = ("model.layers.0.mlp.up_proj", "model.layers.2.mlp.gate_proj")
    weights = write_quantized(demo_model, tmp_path / "mixed", by_name("awq"), floats)
    write_dequantized(demo_model, tmp_path / "floats", weights)
    twin = log_probabilities(tmp_path / "floats", dtype="float32")
    assert distance(log_probabilities(tmp_path / "mixed", dtype="float32"), twin) < 0.3


def test_experts_must_have_one_format(checkpoints: Path, tmp_path: Path) -> None:
    floats = ("model.layers.0.mlp.experts.3.up_proj",)
    write_quantized(checkpoints / "qwen3-moe", tmp_path / "mixed", by_name("gptq-4-asymmetric"), floats)
    message = rejection(tmp_path / "mixed")
    assert "experts.3.up_proj" in message
    assert "share their input, and must be quantized alike; their formats differ" in message


def test_queries_keys_and_values_may_have_several_formats(demo_model: Path, tmp_path: Path) -> None:
    floats = ("model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.q_proj")
    weights = write_quantized(demo_model, tmp_path / "mixed", by_name("awq"), floats)
    write_dequantized(demo_model, tmp_path / "floats", weights)
    twin = log_probabilities(tmp_path / "floats", dtype="float32")
    assert distance(log_probabilities(tmp_path / "mixed", dtype="float32"), twin) < 0.3
