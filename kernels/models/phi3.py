"""Phi-3, Phi-3.5 and Phi-4 of class Phi3ForCausalLM (Abdin et al. 2024): fused layers, and LongRoPE."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder, heads_of, window_of
from quire.kernels.rope import Rope

_OLD_NAMES = ("su", "yarn")
"""Names of LongRoPE in older checkpoints."""


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Phi3ForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    rope, window = _rope(config), window_of(config)
    return build_decoder(
        config,
        Variant(fused_qkv=True, fused_gate_up=True, window=lambda config, layer: window, rotary=lambda layer: rope),
    )


def _rope(config: ModelConfig) -> Rope:
    scaling = {**config.options("rope_scaling"), **config.options("rope_parameters")}
    kind = scaling.get("rope_type", scaling.get("type"))
    scaling["rope_type"] = "longrope" if kind in _OLD_NAMES else kind or "default"
    scaling["original_max_position_embeddings"] = config.size("original_max_position_embeddings", 4096)
    fields = {**config.fields, "rope_scaling": None, "rope_parameters": scaling}
    return Rope.from_config(ModelConfig(fields), heads_of(config).dim, partial=True)
