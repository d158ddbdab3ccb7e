"""Apertus, class ApertusForCausalLM (Swiss AI 2025): norms of query and key heads, xIELU in place of a gated MLP."""

from __future__ import annotations

from quire.kernels.activations import Xielu
from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import FeedForward, Graph, Linear
from quire.kernels.models.decoder import NormNames, Variant, build_decoder

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def build(config: ModelConfig) -> Graph:
    """Return the graph of an ApertusForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=65536, rope_theta=12e6)
    config.restrict("hidden_act", ("xielu",))
    config.restrict("qk_norm", (True,))
    config.restrict("post_norm", (False,))
    config.restrict("mlp_bias", (False,))
    if not config.options("rope_scaling") and not config.options("rope_parameters"):
        config = ModelConfig({**config.fields, "rope_parameters": _LLAMA3}, config.path)
    bias = config.get("attention_bias", False)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
            experts=_feed_forward,
            attention_norms=NormNames("attention_layernorm"),
            mlp_norms=NormNames("feedforward_layernorm"),
        ),
    )


def _feed_forward(config: ModelConfig, layer: int) -> FeedForward:
    mlp = f"model.layers.{layer}.mlp"
    activation = Xielu(*(f"{mlp}.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")))
    up, down = config.size("intermediate_size"), config.size("hidden_size")
    return FeedForward(Linear(f"{mlp}.up_proj.weight", up), Linear(f"{mlp}.down_proj.weight", down), activation)
