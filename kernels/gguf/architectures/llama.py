"""Llama and what is converted like it: Mistral and Mixtral have its architecture, Granite and SmolLM 3 their own."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    DECODER_NAMES,
    EXPERT_NAMES,
    MLP_BIAS,
    ROPE_TENSORS,
    Architecture,
    Field,
    check_off,
    ignored,
    number,
    size,
    sliding_window,
    without,
)

_BIASES: dict[str, Field] = {**ATTENTION_BIAS, **MLP_BIAS}
_DENSE = ("blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down")

_MISTRAL = Architecture(
    "MistralForCausalLM", DECODER_NAMES, {**DECODER, "sliding_window": sliding_window}, ROPE_TENSORS, permuted=True
)
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    {**without(DECODER_NAMES, *_DENSE), **EXPERT_NAMES},
    {
        **DECODER,
        "num_local_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "sliding_window": sliding_window,
    },
    ROPE_TENSORS,
    permuted=True,
)

LLAMA = Architecture(
    "LlamaForCausalLM",
    DECODER_NAMES,
    {**DECODER, **_BIASES},
    ROPE_TENSORS,
    permuted=True,
    variants=(
        (lambda metadata: bool(metadata.own("expert_count")), _MIXTRAL),
        (lambda metadata: bool(metadata.own("attention.sliding_window")), _MISTRAL),
    ),
)

_SSM = tuple(f"ssm.{part}" for part in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"))
"""Keys that Granite 4 has in models without layers that keep a state, too, which are converted as Granite 3."""

GRANITE = replace(
    LLAMA,
    model_class="GraniteForCausalLM",
    fields={
        **DECODER,
        **_BIASES,
        "attention_multiplier": number("attention.scale"),
        "embedding_multiplier": number("embedding_scale", 1.0),
        "residual_multiplier": number("residual_scale", 1.0),
        "logits_scaling": number("logit_scale"),
        "experts": check_off("expert_count", "mixtures of experts are not supported in Granite"),
        "of_hybrids": ignored("expert_used_count", "expert_shared_feed_forward_length", *_SSM),
    },
    variants=(),
)

SMOLLM3 = replace(LLAMA, model_class="SmolLM3ForCausalLM", variants=())
"""Each fourth layer has no rotary embedding, which is the default of config.json; files do not say so."""
