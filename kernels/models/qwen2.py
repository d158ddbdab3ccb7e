"""Qwen2, Qwen2.5 and others of class Qwen2ForCausalLM: Llama with QKV biases, and sliding windows in some layers."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder, window_of


def layer_window(config: ModelConfig, layer: int) -> int:
    """Return the window of a layer, which applies by `layer_types`, or else from layer `max_window_layers` on."""
    types = config.fields.get("layer_types")
    if not config.get("use_sliding_window", False):
        return 0
    if types is None:
        sliding = layer >= config.get("max_window_layers", 0)
    elif not isinstance(types, list) or len(types) != config.size("num_hidden_layers"):
        raise ModelError(f"config.json: layer_types is {types!r}; it must list a type for each layer")
    else:
        sliding = types[layer] == "sliding_attention"
    return window_of(config) if sliding else 0


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Qwen2ForCausalLM."""
    config = config.with_defaults(num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
    return build_decoder(config, Variant(qkv_bias=True, window=layer_window))
