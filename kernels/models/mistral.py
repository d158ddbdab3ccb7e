"""Mistral 7B and others of class MistralForCausalLM (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder, window_of


def _window(config: ModelConfig, layer: int) -> int:
    return window_of(config)


def build(config: ModelConfig) -> Graph:
    """Return the graph of a MistralForCausalLM."""
    config = config.with_defaults(num_key_value_heads=8, sliding_window=4096)
    return build_decoder(config, Variant(window=_window))
