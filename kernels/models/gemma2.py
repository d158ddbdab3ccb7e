"""Gemma 2, class Gemma2ForCausalLM (Gemma Team 2024): norms before and after each block, windows in turns, softcaps."""

from __future__ import annotations

import math

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import NormNames, Variant, build_decoder, sliding_layers, window_of

ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
ATTENTION_NORMS = NormNames("input_layernorm", "post_attention_layernorm")
MLP_NORMS = NormNames("pre_feedforward_layernorm", "post_feedforward_layernorm")
NORM_OFFSET = 1.0
"""Gemma's norms multiply by 1 + weight."""


def attention_scale(config: ModelConfig) -> float:
    """Return the scale of attention scores."""
    return 1.0 / math.sqrt(config.size("query_pre_attn_scalar", 256))


def softcap(config: ModelConfig, field: str) -> float:
    """Return the softcap that config.json has in `field`, 0 if it is null; otherwise it must be above 0."""
    return 0.0 if config.fields.get(field) is None else config.positive(field)


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Gemma2ForCausalLM."""
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, sliding_window=4096,
        tie_word_embeddings=True, final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
    )  # fmt: skip
    config.restrict("use_bidirectional_attention", (False,))
    sliding, bias = sliding_layers(config, 2), config.get("attention_bias", False)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            window=lambda config, layer: window_of(config) if sliding[layer] else 0,
            activation=ACTIVATION,
            attention_norms=ATTENTION_NORMS,
            mlp_norms=MLP_NORMS,
            norm_offset=NORM_OFFSET,
            attention_scale=attention_scale(config),
            attention_softcap=softcap(config, "attn_logit_softcapping"),
            embedding_scale=math.sqrt(config.size("hidden_size")),
            logits_softcap=softcap(config, "final_logit_softcapping"),
        ),
    )
