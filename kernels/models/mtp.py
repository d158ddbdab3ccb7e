"""Heads for multi-token prediction (DeepSeek-V3, arXiv 2412.19437), which checkpoints have beside their models.

A head is one more layer like those of its model with attention. It reads the embedding of a token and the model's
hidden state of the token before, after the final norm; each has a norm of its own, and a linear layer makes one of
both. Where the head drafts on, it reads its own output after its final norm, which is also what the logits come from.
The embedding and the layer of the logits are the model's: where a checkpoint has copies of them, these are not read.
Of several heads only the first is: it drafts all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    DraftInput,
    EmbeddingInput,
    Features,
    Graph,
    LatentAttention,
    Linear,
    Logits,
    Residual,
)


@dataclass(frozen=True)
class _HeadModules:
    """Modules of a head; `{}` is the number of the model's layers."""

    layer: str
    combine: str
    embedding_norm: str
    hidden_norm: str
    norm: str

    def of(self, num_layers: int) -> _HeadModules:
        """Return the names in a checkpoint of a model with so many layers."""
        return _HeadModules(*(getattr(self, field.name).format(num_layers) for field in fields(self)))


_QWEN = _HeadModules("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
_AFTER_LAYERS = _HeadModules(
    "model.layers.{}", "model.layers.{}.eh_proj", "model.layers.{}.enorm", "model.layers.{}.hnorm",
    "model.layers.{}.shared_head.norm",
)  # fmt: skip

NAMES = {
    "DeepseekV3ForCausalLM": _AFTER_LAYERS,
    "Glm4MoeForCausalLM": _AFTER_LAYERS,
    "Glm4MoeLiteForCausalLM": _AFTER_LAYERS,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
"""Modules of heads by the class names of their models."""


def build_head(config: ModelConfig, target: Graph, has: Callable[[str], bool]) -> tuple[Graph, frozenset[str]]:
    """Return the graph of the head that a model's checkpoint has, and the tensors that both share.

    `has` tells whether the checkpoint has a tensor. Raises ModelError.
    """
    if config.architecture not in NAMES or not isinstance(target.logits, Logits):
        raise ModelError(f"method mtp is not supported for {config.architecture}; supported are {', '.join(NAMES)}")
    for section in (config, config.section("text_config")):
        section.restrict("mtp_use_dedicated_embeddings", (False,))
    names, hidden = NAMES[config.architecture].of(len(target.mixers)), target.embedding.hidden_size
    if not has(f"{names.combine}.weight"):
        raise ModelError(
            f"the checkpoint has no head for multi-token prediction: {names.combine}.weight is missing; get one that "
            "has it, in floats unless it is a GGUF file (conversions often leave heads out), or choose another method"
        )
    final = target.logits.norm
    assert final is not None
    norm = replace(final, weight=f"{names.norm}.weight")
    combine = Linear(f"{names.combine}.weight", hidden, tensor_inputs=2 * hidden)
    draft_input = DraftInput(
        Features(final=True), hidden, norm=replace(norm, weight=f"{names.hidden_norm}.weight"),
        combine=replace(combine, first_input=hidden),
        embedded=EmbeddingInput((combine,), replace(norm, weight=f"{names.embedding_norm}.weight")),
    )  # fmt: skip
    attention, last = _last_layer(target, names.layer)
    graph = Graph(
        target.embedding, (attention, replace(last, around=norm)), replace(target.logits, norm=None), draft_input
    )
    return graph, frozenset({target.embedding.weight, target.logits.linear.weight})


def _last_layer(target: Graph, name: str) -> tuple[Residual, Residual]:
    """Return both residual blocks of the model's last layer with attention, as the layer `name`."""
    residuals = target.residuals
    layer = max(i for i, each in enumerate(residuals) if isinstance(each.block, Attention | LatentAttention)) // 2
    attention, feed_forward = _renamed(residuals[2 * layer : 2 * layer + 2], f"model.layers.{layer}.", f"{name}.")
    return attention, feed_forward


def _renamed(part: Any, old: str, new: str) -> Any:
    """Return a part of a graph whose tensors' names begin with `new` where they have begun with `old`."""
    if isinstance(part, str):
        return new + part.removeprefix(old) if part.startswith(old) else part
    if isinstance(part, tuple):
        found = tuple(_renamed(each, old, new) for each in part)
        return found if any(mine is not theirs for mine, theirs in zip(found, part, strict=True)) else part
    if is_dataclass(part) and not isinstance(part, type):
        own = {field.name: getattr(part, field.name) for field in fields(part)}
        changed = {name: found for name, value in own.items() if (found := _renamed(value, old, new)) is not value}
        return replace(part, **changed) if changed else part
    return part
