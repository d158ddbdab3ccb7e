"""Llama 2, 3, 3.1, 3.2, SmolLM and others of class LlamaForCausalLM (Touvron et al. 2023)."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.models.decoder import Variant, build_decoder
from quire.kernels.plan import PlanBuilder


def build(p: PlanBuilder, config: ModelConfig) -> None:
    """The plan of a LlamaForCausalLM."""
    config.refuse("pretraining_tp", (1,))
    bias = config.get("attention_bias", False)
    build_decoder(p, config, Variant(qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False)))
