"""MXFP4 checkpoints of gpt-oss: the weights of their float twins, and errors for what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quantized_checkpoints import Raw, raw_floats, save
from test_quantized_models import distance, log_probabilities

from quire.kernels.errors import ModelError

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 128, 96, 6, 2, 300
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def attention_and_rest(random: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Return random float tensors of all but the experts."""

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "lm_head.weight": normal(VOCABULARY, HIDDEN)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, outputs, inputs in (("q", 128, HIDDEN), ("k", 64, HIDDEN), ("v", 64, HIDDEN), ("o", HIDDEN, 128)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = normal(outputs, inputs)
            tensors[f"{at}.self_attn.{name}_proj.bias"] = normal(outputs)
        tensors[f"{at}.self_attn.sinks"] = normal(4)
        tensors[f"{at}.mlp.router.weight"] = 8 * normal(EXPERTS, HIDDEN)
        tensors[f"{at}.mlp.router.bias"] = normal(EXPERTS)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{at}.mlp.experts.gate_up_proj_bias"] = normal(EXPERTS, 2 * INNER)
        tensors[f"{at}.mlp.experts.down_proj_bias"] = normal(EXPERTS, HIDDEN)
    return tensors


def write(folder: Path, *, scale: int | None = None, drop: str = "", **changes: Any) -> tuple[Path, Path]:
    """Write a checkpoint in MXFP4 and its float twin. `scale` takes the place of one exponent."""
    random = np.random.default_rng(2)
    floats = attention_and_rest(random)
    twin, quantized = dict(floats), {name: raw_floats(value, "F32") for name, value in floats.items()}
    for layer in range(LAYERS):
        for name, outputs, inputs in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            at, shape = f"model.layers.{layer}.mlp.experts.{name}", (EXPERTS, outputs, inputs // 32)
            blocks = random.integers(0, 256, (*shape, 16), np.uint8)
            scales = random.integers(121, 125, shape, np.uint8)
            codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*shape, 32)
            values = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
            twin[at] = np.ascontiguousarray(values.reshape(EXPERTS, outputs, inputs).swapaxes(1, 2))
            scales[1, 2, 0] = scales[1, 2, 0] if scale is None else scale
            quantized[f"{at}_blocks"] = Raw("U8", blocks.shape, blocks.tobytes())
            quantized[f"{at}_scales"] = Raw("U8", scales.shape, scales.tobytes())
    quantized.pop(drop, None)
    config = {**CONFIG, "quantization_config": {**MXFP4, **changes}}
    save(folder / "mxfp4", quantized, config)
    save(folder / "floats", {name: raw_floats(value, "F32") for name, value in twin.items()}, CONFIG)
    return folder / "mxfp4", folder / "floats"


def test_an_mxfp4_model_is_near_its_float_twin(tmp_path: Path) -> None:
    """Only activations are rounded, to 8 bits in groups of 32; another order of codes or rows would cost nats."""
    quantized, twin = write(tmp_path)
    expected = log_probabilities(twin, dtype="float32")
    assert distance(log_probabilities(quantized, dtype="float32"), expected) < 0.02
    assert distance(log_probabilities(quantized), log_probabilities(twin, dtype="bfloat16")) < 0.05


def test_wrong_checkpoints_are_rejected(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scale": 255}, r"experts.1.gate_proj.weight.* can't be packed: a scale is a NaN"),
        ({"drop": "model.layers.1.mlp.experts.down_proj_scales"}, "down_proj_scales of shape .* is missing"),
        ({"modules_to_not_convert": ["model.layers.*.mlp"]}, "modules_to_not_convert has 'model.layers.*.mlp'"),
    ]
    for number, (changes, message) in enumerate(cases):
        quantized, _ = write(tmp_path / str(number), **changes)
        with pytest.raises(ModelError, match=message):
            log_probabilities(quantized)


def test_the_method_may_be_named(tmp_path: Path) -> None:
    quantized, twin = write(tmp_path)
    expected = log_probabilities(quantized)
    np.testing.assert_array_equal(log_probabilities(quantized, quantization="mxfp4"), expected)
    with pytest.raises(ModelError, match="is not quantized"):
        log_probabilities(twin, quantization="mxfp4")
