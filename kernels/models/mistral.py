"""Mistral 7B and others of class MistralForCausalLM (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.models.decoder import Variant, build_decoder
from quire.kernels.plan import PlanBuilder


def _window(config: ModelConfig, layer: int) -> int:
    return config.get("sliding_window", 0)


def build(p: PlanBuilder, config: ModelConfig) -> None:
    """The plan of a MistralForCausalLM."""
    build_decoder(p, config, Variant(window=_window))
