"""SmolLM 3, class SmolLM3ForCausalLM: Llama with layers that have no rotary embedding."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder, heads_of, sliding_layers, window_of
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a SmolLM3ForCausalLM."""
    config = config.with_defaults(
        num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, tie_word_embeddings=True
    )
    rotated, rope = _rotated_layers(config), Rope.from_config(config, heads_of(config).dim)
    sliding = sliding_layers(config, 1) if config.strings("layer_types") else [not rotates for rotates in rotated]
    window = window_of(config) if config.get("use_sliding_window", False) else 0
    bias = config.get("attention_bias", False)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.get("mlp_bias", False),
            window=lambda config, layer: window if sliding[layer] else 0,
            rotary=lambda layer: rope if rotated[layer] else None,
        ),
    )


def _rotated_layers(config: ModelConfig) -> list[bool]:
    """Return for each layer whether it has the rotary embedding: 1 in `no_rope_layers`, despite the name."""
    layers, given = config.size("num_hidden_layers"), config.fields.get("no_rope_layers")
    if given is None:
        interval = config.size("no_rope_layer_interval", 4)
        rotated = [(layer + 1) % interval != 0 for layer in range(layers)]
    elif isinstance(given, list) and len(given) >= layers and all(entry in (0, 1) for entry in given):
        rotated = [bool(entry) for entry in given[:layers]]
    else:
        raise ModelError(f"config.json: no_rope_layers is {given!r}; it must list 0 or 1 for each of {layers} layers")
    if not any(rotated):
        raise ModelError("config.json: no layer has a rotary embedding (no_rope_layers), which is not supported")
    return rotated
