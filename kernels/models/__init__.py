"""The architectures, one file each: what a checkpoint's config becomes as a plan."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.models import gpt2, llama, mistral, qwen2, qwen3
from quire.kernels.plan import PlanBuilder
from quire.kernels.rope import Rope

ARCHITECTURES: dict[str, Callable[[PlanBuilder, ModelConfig], None]] = {
    "GPT2LMHeadModel": gpt2.build,
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}
"""By the class name in config.json's `architectures`."""


def build_plan(p: PlanBuilder, config: ModelConfig) -> None:
    """Adds the model of `config` to the plan. Raises ModelError for an architecture or a field that isn't known."""
    build = ARCHITECTURES.get(config.architecture)
    if build is None:
        raise ModelError(
            f"architecture {config.architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    build(p, config)


def max_positions(config: ModelConfig) -> int:
    """The longest sequence that the model was made for, in tokens; a scaling of RoPE extends it."""
    if "n_positions" in config.fields:
        return config.size("n_positions")
    return Rope.from_config(config, 2).reach
