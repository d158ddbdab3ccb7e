"""OLMo 3, class Olmo3ForCausalLM (OLMo Team 2025): OLMo 2 with a sliding window in three of four layers.

Layers with a window have the rotary embedding without its scaling.
"""

from __future__ import annotations

from typing import Any

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import (
    NormNames,
    Variant,
    build_decoder,
    rope_of_kind,
    sliding_layers,
    window_of,
)
from quire.kernels.rope import Rope

_THETA = 5e5
_SCALING = "rope_scaling"


def build(config: ModelConfig) -> Graph:
    """Return the graph of an Olmo3ForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5, sliding_window=4096)
    bias, window, sliding = config.get("attention_bias", False), window_of(config), sliding_layers(config, 4)
    local, full = (_rope(config, kind) for kind in ("sliding_attention", "full_attention"))
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
            joint_head_norms=True,
            window=lambda config, layer: window if sliding[layer] else 0,
            rotary=lambda layer: local if sliding[layer] else full,
            attention_norms=NormNames(after="post_attention_layernorm"),
            mlp_norms=NormNames(after="post_feedforward_layernorm"),
        ),
    )


def _rope(config: ModelConfig, kind: str) -> Rope:
    """Return the rotary embedding of the layers of a type; early files of transformers 5 have one for all layers."""
    parameters = config.options("rope_parameters")
    if not any(isinstance(value, dict) for value in parameters.values()):
        scaling = {"rope_theta": config.get("rope_theta", _THETA), **config.options(_SCALING), **parameters}
        config = ModelConfig({**config.fields, _SCALING: scaling, "rope_parameters": None}, config.path)
    given = config.options(_SCALING)
    theta = given.get("rope_theta", config.get("rope_theta", _THETA))
    before: dict[str, Any] = {"rope_theta": theta, **(given if kind == "full_attention" else {})}
    return rope_of_kind(config, kind, before, _THETA)
