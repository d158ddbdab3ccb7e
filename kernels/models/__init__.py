"""Architectures, one file each, which build the graph of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models import gpt2, llama, mistral, qwen2, qwen3
from quire.kernels.rope import Rope

ARCHITECTURES: dict[str, Callable[[ModelConfig], Graph]] = {
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


def max_positions(config: ModelConfig) -> int:
    """Return the longest sequence that the model supports, in tokens; scaling of RoPE extends it."""
    if "n_positions" in config.fields:
        return config.size("n_positions")
    return Rope.from_config(config, 2).reach
