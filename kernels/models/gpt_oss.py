"""gpt-oss, class GptOssForCausalLM (OpenAI 2025): experts with biases and a clamped SwiGLU, and attention sinks."""

from __future__ import annotations

from quire.kernels.activations import ClampedSwiglu
from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, build_decoder, sliding_layers, window_of
from quire.kernels.models.experts import experts

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def build(config: ModelConfig) -> Graph:
    """Return the graph of a GptOssForCausalLM."""
    config = config.with_defaults(
        head_dim=64, num_key_value_heads=8, sliding_window=128, rms_norm_eps=1e-5, rope_theta=150000.0,
        max_position_embeddings=131072, num_experts_per_tok=4, num_local_experts=128,
    )  # fmt: skip
    if not config.options("rope_scaling") and not config.options("rope_parameters"):
        config = ModelConfig({**config.fields, "rope_scaling": _YARN})
    config.restrict("hidden_act", ("silu",))
    bias, sliding = config.get("attention_bias", True), sliding_layers(config, 2)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
            window=lambda config, layer: window_of(config) if sliding[layer] else 0,
            experts=_experts,
        ),
    )


def _experts(config: ModelConfig, layer: int) -> Experts:
    swiglu = ClampedSwiglu(config.positive("swiglu_limit", 7.0), config.positive("swiglu_alpha", 1.702))
    count, inner = config.size("num_local_experts"), config.size("intermediate_size")
    return experts(config, layer, count, inner, swiglu, bias=True, normalize=True)
