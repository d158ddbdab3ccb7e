"""Architectures, one file each, which build the graph of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models import gemma2, gemma3, gpt2, llama, mistral, qwen2, qwen3

ARCHITECTURES: dict[str, Callable[[ModelConfig], Graph]] = {
    "Gemma2ForCausalLM": gemma2.build,
    "Gemma3ForCausalLM": gemma3.build,
    "Gemma3ForConditionalGeneration": gemma3.build_text_part,
    "GPT2LMHeadModel": gpt2.build,
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
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
