"""Architectures, one file each, which build the graph of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models import (
    cohere2,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    starcoder2,
)

ARCHITECTURES: dict[str, Callable[[ModelConfig], Graph]] = {
    "Cohere2ForCausalLM": cohere2.build,
    "Gemma2ForCausalLM": gemma2.build,
    "Gemma3ForCausalLM": gemma3.build,
    "Gemma3ForConditionalGeneration": gemma3.build_text_part,
    "Glm4ForCausalLM": glm4.build,
    "GPT2LMHeadModel": gpt2.build,
    "GraniteForCausalLM": granite.build,
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Olmo2ForCausalLM": olmo2.build,
    "Phi3ForCausalLM": phi3.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
    "SmolLM3ForCausalLM": smollm3.build,
    "Starcoder2ForCausalLM": starcoder2.build,
}
"""Builders by the class name in config.json's `architectures`."""


def build_graph(config: ModelConfig) -> Graph:
    """Return the graph of a model. Raises ModelError for an architecture or a field that is not supported."""
    build = ARCHITECTURES.get(config.architecture)
    if build is None:
        raise ModelError(
            f"architecture {config.architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return build(config)
