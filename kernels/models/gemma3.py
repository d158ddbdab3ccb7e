"""Gemma 3, class Gemma3ForCausalLM (Gemma Team 2025), and the text part of Gemma3ForConditionalGeneration.

As Gemma 2 with norms of query and key heads for softcaps, and two rotary embeddings: five layers with a window have one
of a short range, each sixth layer has one of a long range without a window.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder, rope_of_kind, sliding_layers, window_of
from quire.kernels.models.gemma2 import (
    ACTIVATION,
    ATTENTION_NORMS,
    MLP_NORMS,
    NORM_OFFSET,
    attention_scale,
    softcap,
)
from quire.kernels.rope import Rope

_THETA = {"full_attention": 1e6, "sliding_attention": 1e4}


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Gemma3ForCausalLM, or of a Gemma3TextModel, which EmbeddingGemma has as an encoder."""
    config = config.with_defaults(
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, sliding_window=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    if config.architecture != "Gemma3TextModel":
        config.restrict("use_bidirectional_attention", (False,))
    bidirectional = config.get("use_bidirectional_attention", False)
    window = window_of(config) // 2 + 1 if bidirectional and window_of(config) else window_of(config)
    config.restrict("attn_logit_softcapping")
    sliding, bias = (
        sliding_layers(config, config.size("sliding_window_pattern", 6)),
        config.get("attention_bias", False),
    )
    local, full = (rope_of_layers(config, kind) for kind in ("sliding_attention", "full_attention"))
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
            window=lambda config, layer: window if sliding[layer] else 0,
            bidirectional=bidirectional,
            rotary=lambda layer: local if sliding[layer] else full,
            activation=ACTIVATION,
            attention_norms=ATTENTION_NORMS,
            mlp_norms=MLP_NORMS,
            norm_offset=NORM_OFFSET,
            attention_scale=attention_scale(config),
            embedding_scale=math.sqrt(config.size("hidden_size")),
            logits_softcap=softcap(config, "final_logit_softcapping"),
        ),
    )


def rope_of_layers(config: ModelConfig, kind: str) -> Rope:
    """Return the rotary embedding of the layers of a kind."""
    if kind == "sliding_attention":
        before: dict[str, Any] = {"rope_theta": config.get("rope_local_base_freq", _THETA[kind])}
    else:
        before = {"rope_theta": config.get("rope_theta", _THETA[kind]), **config.options("rope_scaling")}
    return replace(rope_of_kind(config, kind, before, _THETA[kind]), extended=True)
