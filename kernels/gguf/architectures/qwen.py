"""Qwen2, Qwen2.5 and Qwen3, dense and with experts. Windows, which files do not have, are not used by these models."""

from __future__ import annotations

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    DECODER_NAMES,
    EXPERT_NAMES,
    HEAD_NORM_NAMES,
    ROPE_TENSORS,
    Architecture,
    Field,
    constant,
    size,
    without,
)
from quire.kernels.gguf.metadata import Metadata


def dense_layers(metadata: Metadata) -> list[int]:
    """Return `mlp_only_layers`, the layers without experts."""
    layers = {int(name.split(".")[1]) for name in metadata.tensors if name.endswith(".ffn_gate.weight")}
    return sorted(layers)


def _expert_size(metadata: Metadata) -> int:
    """Return `moe_intermediate_size`; old files have it only as a part of that of a dense layer."""
    used = metadata.size("expert_used_count")
    return metadata.size("expert_feed_forward_length", max(1, metadata.size("feed_forward_length") // used))


_EXPERTS: dict[str, Field] = {
    "num_experts": size("expert_count"),
    "num_experts_per_tok": size("expert_used_count"),
    "moe_intermediate_size": _expert_size,
    "mlp_only_layers": dense_layers,
}
_SHARED_NAMES = {
    "blk.*.ffn_gate_inp_shexp": "model.layers.*.mlp.shared_expert_gate",
    "blk.*.ffn_gate_shexp": "model.layers.*.mlp.shared_expert.gate_proj",
    "blk.*.ffn_up_shexp": "model.layers.*.mlp.shared_expert.up_proj",
    "blk.*.ffn_down_shexp": "model.layers.*.mlp.shared_expert.down_proj",
}

QWEN2 = Architecture("Qwen2ForCausalLM", DECODER_NAMES, DECODER, ROPE_TENSORS)
QWEN3 = Architecture(
    "Qwen3ForCausalLM", {**DECODER_NAMES, **HEAD_NORM_NAMES}, {**DECODER, **ATTENTION_BIAS}, ROPE_TENSORS
)
QWEN2MOE = Architecture(
    "Qwen2MoeForCausalLM",
    {**DECODER_NAMES, **EXPERT_NAMES, **_SHARED_NAMES},
    {
        **DECODER,
        **_EXPERTS,
        "shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
        "norm_topk_prob": constant(False),
        "qkv_bias": ATTENTION_BIAS["attention_bias"],
    },
)
QWEN3MOE = Architecture(
    "Qwen3MoeForCausalLM",
    {**DECODER_NAMES, **HEAD_NORM_NAMES, **EXPERT_NAMES},
    {**DECODER, **_EXPERTS, **ATTENTION_BIAS, "norm_topk_prob": constant(True)},
)

OLMOE = Architecture(
    "OlmoeForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down"),
        **HEAD_NORM_NAMES,
        **EXPERT_NAMES,
    },
    {
        **DECODER,
        "num_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "norm_topk_prob": constant(False),
        **ATTENTION_BIAS,
    },
)
