"""EXAONE 4.0, class Exaone4ForCausalLM (LG AI Research 2025): norms after blocks, and of query and key heads.

Models with a sliding window have full attention in each fourth layer, which then has no rotary embedding.
"""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import NormNames, Variant, build_decoder, heads_of, sliding_layers, window_of
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of an Exaone4ForCausalLM."""
    config = config.with_defaults(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    window, rope = window_of(config), Rope.from_config(config, heads_of(config).dim)
    sliding = _sliding_layers(config) if window else [False] * config.size("num_hidden_layers")
    return build_decoder(
        config,
        Variant(
            head_norms=True,
            window=lambda config, layer: window if sliding[layer] else 0,
            rotary=lambda layer: rope if sliding[layer] or not window else None,
            attention_norms=NormNames(after="post_attention_layernorm"),
            mlp_norms=NormNames(after="post_feedforward_layernorm"),
        ),
    )


def _sliding_layers(config: ModelConfig) -> list[bool]:
    """Return for each layer whether it has the window: by `layer_types`, or else by a period."""
    if not config.strings("layer_types") and isinstance(config.fields.get("sliding_window_pattern"), str):
        pattern = config.fields["sliding_window_pattern"]
        raise ModelError(
            f"config.json: {config.path}sliding_window_pattern is {pattern!r}, which is not supported without "
            "layer_types; it must be a number, or layer_types must name the attention of each layer"
        )
    sliding = sliding_layers(config, 4 if config.strings("layer_types") else config.size("sliding_window_pattern", 4))
    if not any(sliding):
        raise ModelError(f"config.json: {config.path}layer_types has no sliding_attention, but there is sliding_window")
    return sliding
