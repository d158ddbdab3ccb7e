"""Random-weight Hugging Face checkpoints that the model tests run, and the reference outputs of `transformers`.

`CHECKPOINTS` lists them; `checkpoint_files.py` writes them without torch, from what `make_references.py` has stored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

PROMPT_LENGTHS = (1, 2, 5, 31, 64, 129, 300, 700)
EMBEDDED = ("gpt2-untied", "llama-tied-llama3", "qwen3-biases-window")  # checkpoints whose hidden states are stored
NEW_TOKENS = 64  # after the prompts they cross edges of pages and of every sliding window
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256, "rope_theta": 10000.0,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0,
    "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 4.0, "logits_scaling": 2.0, "residual_multiplier": 0.8, "attention_multiplier": 0.2,
}  # fmt: skip
HUNYUAN_ROPE = {"rope_type": "dynamic", "alpha": 30.0, "factor": 1.0, "rope_theta": 10000.0}
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}

OLMO3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "full_attention": {**YARN_ROPE, "rope_theta": 20000.0, "attention_factor": 1.3},
}


def longrope(frequencies: int, **more: float) -> dict[str, Any]:
    """Return LongRoPE with two different factors for each frequency."""
    factors = {
        "short_factor": [1 + i / frequencies for i in range(frequencies)],
        "long_factor": [2 + 3 * i / frequencies for i in range(frequencies)],
    }
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **more}


@dataclasses.dataclass(frozen=True)
class ReferenceCheckpoint:
    """One checkpoint: the arguments of its config class, its storage dtype, and the most bytes of a file.

    `embedding` is the standard deviation of the embedding; the layers must outweigh it, or else greedy continuations
    repeat one token.
    """

    name: str
    model_type: str
    config: dict[str, Any]
    dtype: str = "float32"
    max_shard_size: int = 10**9
    embedding: float = 0.3

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts."""
        return bool({"num_experts_per_tok", "moe_k"} & set(self.config))


@dataclasses.dataclass(frozen=True)
class References:
    """What `transformers` makes of one checkpoint: its files' config and shapes, and its outputs for some prompts.

    The log probabilities are those of tokens 1, 2, ... of each prompt, all in one row. `last` and `mean` pool the
    hidden states after the final norm, [prompts, hidden_size]; only checkpoints in `EMBEDDED` have them.
    """

    config: dict[str, Any]
    shapes: dict[str, list[int]]
    prompts: list[list[int]]
    greedy: list[list[int]]
    logprobs: Floats
    logprobs_bfloat16: Floats
    pooled: dict[str, Floats]  # pooled vectors, by `last`, `mean`, `last_bfloat16` and `mean_bfloat16`


def _decoder(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        **more,
    }


def _latent(layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Return a model of latent attention whose heads have three different sizes."""
    sizes = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 96, "kv_lora_rank": 128}
    return _decoder(256, 352, layers, heads, heads, 32, vocab_size=503, **sizes) | more


def _deepseek(layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Return a model of latent attention whose layers are dense by default."""
    return _latent(layers, heads, **{"first_k_dense_replace": layers, **more})


CHECKPOINTS = (
    ReferenceCheckpoint(
        "gpt2-tied", "gpt2", {"n_embd": 256, "n_head": 4, "n_layer": 2, "vocab_size": 503, "n_positions": 1024}
    ),
    ReferenceCheckpoint(
        "gpt2-untied",
        "gpt2",
        {"n_embd": 320, "n_head": 4, "n_layer": 3, "n_inner": 704, "vocab_size": 1021, "n_positions": 800,
         "tie_word_embeddings": False},
        dtype="bfloat16",
        max_shard_size=700_000,
    ),
    ReferenceCheckpoint(
        "llama-tied-llama3",
        "llama",
        _decoder(256, 688, 2, 4, 4, 64, vocab_size=503, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "llama-biases-linear",
        "llama",
        _decoder(384, 512, 3, 4, 1, 96, vocab_size=1021, attention_bias=True, mlp_bias=True,
                 rope_parameters=LINEAR_ROPE),
        dtype="bfloat16",
        max_shard_size=800_000,
    ),
    ReferenceCheckpoint(
        "llama-gqa8-dynamic",
        "llama",
        _decoder(256, 352, 2, 8, 1, 128, vocab_size=1021, rope_parameters=DYNAMIC_ROPE, rms_norm_eps=1e-5),
    ),
    ReferenceCheckpoint(
        "mistral-window128",
        "mistral",
        _decoder(256, 512, 2, 4, 1, 64, vocab_size=503, sliding_window=128, tie_word_embeddings=True),
    ),
    ReferenceCheckpoint(
        "mistral-window77",
        "mistral",
        _decoder(320, 448, 3, 8, 1, 80, vocab_size=1021, sliding_window=77),
        dtype="bfloat16",
        max_shard_size=600_000,
    ),
    ReferenceCheckpoint(
        "qwen2-tied-window",
        "qwen2",
        _decoder(256, 512, 3, 4, 4, 64, vocab_size=503, tie_word_embeddings=True, use_sliding_window=True,
                 sliding_window=100, max_window_layers=1),
    ),
    ReferenceCheckpoint(
        "qwen2-yarn",
        "qwen2",
        _decoder(512, 480, 2, 4, 1, 128, vocab_size=1021, rope_parameters=YARN_ROPE),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "qwen3-tied",
        "qwen3",
        _decoder(256, 512, 2, 8, 2, 128, vocab_size=503, tie_word_embeddings=True,
                 rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "qwen3-biases-window",
        "qwen3",
        _decoder(384, 400, 3, 6, 6, 96, vocab_size=1021, attention_bias=True, use_sliding_window=True,
                 sliding_window=150, max_window_layers=2),
        max_shard_size=700_000,
    ),
    ReferenceCheckpoint(
        "gemma3-window100",
        "gemma3_text",
        _decoder(256, 352, 4, 4, 1, 256, vocab_size=503, sliding_window=100, rope_parameters=GEMMA3_ROPES,
                 query_pre_attn_scalar=160,
                 layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]),
        dtype="bfloat16",
        max_shard_size=700_000,
        embedding=0.05,
    ),
    ReferenceCheckpoint(
        "gemma3n-window100",
        "gemma3n_text",
        _decoder(256, 176, 6, 4, 2, 64, vocab_size=503, sliding_window=100, rope_parameters=GEMMA3_ROPES,
                 layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
                 num_kv_shared_layers=3, vocab_size_per_layer_input=503, hidden_size_per_layer_input=32,
                 altup_num_inputs=4, laurel_rank=48, activation_sparsity_pattern=[0.9, 0.7, 0.3, 0.0, 0.0, 0.0],
                 final_logit_softcapping=5.0),
        dtype="bfloat16",
        max_shard_size=900_000,
        embedding=0.05,
    ),
    ReferenceCheckpoint(
        "gemma3n-two-streams",
        "gemma3n_text",
        _decoder(320, 448, 3, 8, 4, 64, vocab_size=1021, sliding_window=77, altup_num_inputs=2,
                 intermediate_size=[448, 352, 448], altup_correct_scale=False, num_kv_shared_layers=0,
                 hidden_size_per_layer_input=64, vocab_size_per_layer_input=900, laurel_rank=16,
                 layer_types=["sliding_attention", "full_attention", "full_attention"]),
        embedding=0.05,
    ),
    ReferenceCheckpoint(
        "gemma4-shared-window100",
        "gemma4_text",
        _decoder(256, 176, 6, 4, 1, 64, vocab_size=503, sliding_window=100, global_head_dim=128,
                 layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
                 num_kv_shared_layers=3, use_double_wide_mlp=True, vocab_size_per_layer_input=503,
                 hidden_size_per_layer_input=32, final_logit_softcapping=5.0),
        dtype="bfloat16",
        max_shard_size=900_000,
        embedding=0.05,
    ),
    ReferenceCheckpoint(
        "gemma4-keys-as-values",
        "gemma4_text",
        _decoder(320, 448, 3, 8, 4, 64, vocab_size=1021, sliding_window=77, global_head_dim=128,
                 num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
                 layer_types=["sliding_attention", "full_attention", "full_attention"]),
        embedding=0.05,
    ),
    ReferenceCheckpoint(
        "gemma4-experts",
        "gemma4_text",
        _decoder(256, 208, 3, 4, 2, 96, vocab_size=503, sliding_window=150, global_head_dim=192,
                 num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
                 enable_moe_block=True, num_experts=12, top_k_experts=3, moe_intermediate_size=80,
                 layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
        dtype="bfloat16",
        embedding=0.05,
    ),
    ReferenceCheckpoint(
        "gemma2-window77",
        "gemma2",
        _decoder(256, 352, 3, 4, 2, 128, vocab_size=1021, sliding_window=77, query_pre_attn_scalar=96,
                 attn_logit_softcapping=3.0, final_logit_softcapping=3.0),
        embedding=0.05,
    ),
    ReferenceCheckpoint(
        "phi3-window90-short",
        "phi3",
        _decoder(256, 352, 2, 4, 2, 64, vocab_size=503, sliding_window=90, partial_rotary_factor=0.75,
                 rope_parameters=longrope(24, factor=4.0), original_max_position_embeddings=1024),
    ),
    ReferenceCheckpoint(
        "phi3-long",
        "phi3",
        _decoder(320, 448, 3, 4, 4, 80, vocab_size=1021, tie_word_embeddings=True,
                 rope_parameters=longrope(40, attention_factor=1.2), original_max_position_embeddings=1),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "starcoder2-window77",
        "starcoder2",
        _decoder(256, 512, 3, 4, 1, 64, vocab_size=503, sliding_window=77),
    ),
    ReferenceCheckpoint(
        "granite-multipliers",
        "granite",
        _decoder(256, 352, 2, 4, 2, 64, vocab_size=503, tie_word_embeddings=True, embedding_multiplier=3.0,
                 logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.2),
        embedding=0.15,
    ),
    ReferenceCheckpoint(
        "smollm3-window100",
        "smollm3",
        _decoder(256, 352, 3, 4, 1, 64, vocab_size=503, no_rope_layers=[1, 0, 1], use_sliding_window=True,
                 sliding_window=100),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "olmo2-joint-norms",
        "olmo2",
        _decoder(256, 352, 2, 4, 2, 64, vocab_size=503),
    ),
    ReferenceCheckpoint(
        "glm4-interleaved",
        "glm4",
        _decoder(320, 448, 2, 4, 2, 96, vocab_size=503, rope_parameters={"rope_theta": 10000.0,
                 "partial_rotary_factor": 0.5}, attention_bias=True),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "cohere2-window77",
        "cohere2",
        _decoder(256, 352, 4, 4, 2, 64, vocab_size=503, sliding_window=77, logit_scale=0.5),
    ),
    ReferenceCheckpoint(
        "mixtral-window100",
        "mixtral",
        _decoder(256, 176, 3, 4, 2, 64, vocab_size=503, num_local_experts=8, num_experts_per_tok=2,
                 sliding_window=100),
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "qwen2-moe-shared-window",
        "qwen2_moe",
        _decoder(256, 352, 4, 4, 4, 64, vocab_size=1021, num_experts=20, num_experts_per_tok=4,
                 moe_intermediate_size=80, shared_expert_intermediate_size=208, decoder_sparse_step=2,
                 use_sliding_window=True, sliding_window=90, max_window_layers=3),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "qwen2-moe-normalized",
        "qwen2_moe",
        _decoder(320, 352, 2, 4, 4, 80, vocab_size=503, num_experts=12, num_experts_per_tok=3,
                 moe_intermediate_size=96, shared_expert_intermediate_size=160, norm_topk_prob=True,
                 mlp_only_layers=[0]),
    ),
    ReferenceCheckpoint(
        "qwen3-moe",
        "qwen3_moe",
        _decoder(256, 352, 3, 8, 2, 128, vocab_size=503, num_experts=40, num_experts_per_tok=6,
                 moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[1]),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "qwen3-moe-window",
        "qwen3_moe",
        _decoder(256, 352, 2, 4, 1, 64, vocab_size=1021, num_experts=16, num_experts_per_tok=4,
                 moe_intermediate_size=112, attention_bias=True, use_sliding_window=True, sliding_window=150),
    ),
    ReferenceCheckpoint(
        "olmoe",
        "olmoe",
        _decoder(256, 112, 2, 4, 2, 64, vocab_size=503, num_experts=24, num_experts_per_tok=5),
    ),
    ReferenceCheckpoint(
        "gpt-oss-window100",
        "gpt_oss",
        _decoder(320, 208, 4, 8, 2, 64, vocab_size=503, num_local_experts=12, num_experts_per_tok=4,
                 sliding_window=100, swiglu_limit=2.0,
                 rope_parameters={**YARN_ROPE, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint("deepseek2-dense", "deepseek_v2", _deepseek(2, 4, q_lora_rank=None)),
    ReferenceCheckpoint(
        "deepseek2-dense-yarn",
        "deepseek_v2",
        _deepseek(2, 8, q_lora_rank=80, attention_bias=True, mlp_bias=True, rope_parameters=DEEPSEEK_ROPE),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "deepseek3-dense-yarn",
        "deepseek_v3",
        _deepseek(2, 4, q_lora_rank=96, kv_lora_rank=160, rope_parameters=DEEPSEEK_ROPE),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "deepseek3-dense-halves", "deepseek_v3", _deepseek(2, 4, q_lora_rank=None, rope_interleave=False)
    ),
    ReferenceCheckpoint(
        "deepseek2-experts",
        "deepseek_v2",
        _deepseek(3, 4, q_lora_rank=None, first_k_dense_replace=1, n_routed_experts=12, num_experts_per_tok=3,
                  moe_intermediate_size=96, n_shared_experts=2),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "deepseek2-groups-yarn",
        "deepseek_v2",
        _deepseek(2, 4, q_lora_rank=80, first_k_dense_replace=0, n_routed_experts=16, num_experts_per_tok=3,
                  moe_intermediate_size=80, n_shared_experts=1, topk_method="group_limited_greedy", n_group=4,
                  topk_group=2, routed_scaling_factor=4.0, rope_parameters=DEEPSEEK_ROPE),
    ),
    ReferenceCheckpoint(
        "deepseek3-experts-yarn",
        "deepseek_v3",
        _deepseek(3, 4, q_lora_rank=96, first_k_dense_replace=1, n_routed_experts=16, num_experts_per_tok=4,
                  moe_intermediate_size=80, n_shared_experts=1, n_group=4, topk_group=2,
                  rope_parameters=DEEPSEEK_ROPE),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "deepseek3-plain-weights",
        "deepseek_v3",
        _deepseek(2, 8, q_lora_rank=None, first_k_dense_replace=0, n_routed_experts=12, num_experts_per_tok=3,
                  moe_intermediate_size=96, n_shared_experts=2, n_group=1, topk_group=1, norm_topk_prob=False,
                  routed_scaling_factor=1.5),
    ),
    ReferenceCheckpoint(
        "lfm2-tied",
        "lfm2",
        _decoder(256, 768, 4, 4, 2, 64, vocab_size=503, tie_word_embeddings=True, block_multiple_of=32,
                 layer_types=["conv", "full_attention", "conv", "full_attention"]),
    ),
    ReferenceCheckpoint(
        "lfm2-biases",
        "lfm2",
        _decoder(320, 512, 3, 5, 1, 64, vocab_size=1021, conv_bias=True, conv_L_cache=4, tie_word_embeddings=False,
                 block_auto_adjust_ff_dim=False, full_attn_idxs=[1]),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "lfm2-moe",
        "lfm2_moe",
        _decoder(256, 352, 3, 4, 2, 64, vocab_size=503, num_dense_layers=1, num_experts=12, num_experts_per_tok=3,
                 moe_intermediate_size=96, layer_types=["conv", "full_attention", "conv"], routed_scaling_factor=1.5),
    ),
    ReferenceCheckpoint(
        "qwen3-next-experts",
        "qwen3_next",
        _decoder(256, 352, 4, 4, 2, 64, vocab_size=503, linear_num_key_heads=2, linear_num_value_heads=6,
                 linear_key_head_dim=32, linear_value_head_dim=48, num_experts=12, num_experts_per_tok=3,
                 moe_intermediate_size=96, shared_expert_intermediate_size=160, decoder_sparse_step=2),
    ),
    ReferenceCheckpoint(
        "qwen3.5-tied",
        "qwen3_5_text",
        _decoder(256, 512, 4, 4, 1, 64, vocab_size=503, linear_num_key_heads=4, linear_num_value_heads=4,
                 linear_key_head_dim=64, linear_value_head_dim=64, tie_word_embeddings=True,
                 rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5,
                                  "mrope_section": [6, 5, 5], "mrope_interleaved": True}),
    ),
    ReferenceCheckpoint(
        "qwen3.5-grouped",
        "qwen3_5_text",
        _decoder(320, 448, 3, 4, 2, 64, vocab_size=1021, linear_num_key_heads=4, linear_num_value_heads=8,
                 linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=3,
                 layer_types=["full_attention", "linear_attention", "linear_attention"]),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "qwen3.5-moe",
        "qwen3_5_moe_text",
        _decoder(256, 352, 4, 4, 2, 64, vocab_size=503, linear_num_key_heads=2, linear_num_value_heads=4,
                 linear_key_head_dim=32, linear_value_head_dim=32, num_experts=12, num_experts_per_tok=3,
                 moe_intermediate_size=96, shared_expert_intermediate_size=96),
    ),
    ReferenceCheckpoint(
        "granite4-experts",
        "granitemoehybrid",
        _decoder(256, 96, 3, 4, 2, 64, vocab_size=503, mamba_n_heads=8, mamba_d_state=32, mamba_d_head=64,
                 layer_types=["linear_attention", "full_attention", "linear_attention"], num_local_experts=12,
                 num_experts_per_tok=3, shared_intermediate_size=160, **GRANITE),
    ),
    ReferenceCheckpoint(
        "granite4-dense-rope",
        "granitemoehybrid",
        _decoder(320, 96, 3, 5, 1, 64, vocab_size=1021, mamba_n_heads=20, mamba_d_state=48, mamba_n_groups=2,
                 layer_types=["linear_attention", "linear_attention", "full_attention"], num_local_experts=0,
                 shared_intermediate_size=448, position_embedding_type="rope", mamba_d_head=32,
                 mamba_proj_bias=True, tie_word_embeddings=True, **GRANITE),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "falcon-h1-multipliers",
        "falcon_h1",
        _decoder(256, 512, 2, 4, 2, 64, vocab_size=503, mamba_d_ssm=192, mamba_n_heads=6, mamba_d_head=32,
                 mamba_d_state=64, lm_head_multiplier=0.5, embedding_multiplier=2.0, mlp_multipliers=[0.7, 1.5],
                 key_multiplier=0.6, attention_in_multiplier=1.2, attention_out_multiplier=0.9,
                 ssm_multipliers=[0.8, 1.1, 1.3, 0.9, 0.7], ssm_in_multiplier=1.25, ssm_out_multiplier=1.4),
    ),
    ReferenceCheckpoint(
        "falcon-h1-norm",
        "falcon_h1",
        _decoder(320, 448, 2, 5, 1, 64, vocab_size=1021, mamba_d_ssm=320, mamba_n_heads=10, mamba_d_head=32,
                 mamba_n_groups=2, mamba_d_state=32, mamba_rms_norm=True, mamba_norm_before_gate=False,
                 projectors_bias=True, mlp_bias=True),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "nemotron-h-experts",
        "nemotron_h",
        {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "vocab_size": 503, "max_position_embeddings": 1024, "mamba_num_heads": 8, "mamba_head_dim": 32,
         "ssm_state_size": 32, "n_groups": 2, "n_routed_experts": 12, "num_experts_per_tok": 3,
         "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 160, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.5,
         "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "mlp"]},
    ),
    ReferenceCheckpoint(
        "nemotron-h-latent-experts",
        "nemotron_h",
        {"hidden_size": 320, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 1,
         "head_dim": 64, "vocab_size": 1021, "max_position_embeddings": 1024, "mamba_num_heads": 10,
         "mamba_head_dim": 32, "ssm_state_size": 48, "n_groups": 1, "n_routed_experts": 16, "num_experts_per_tok": 5,
         "moe_intermediate_size": 160, "moe_shared_expert_intermediate_size": 224, "moe_latent_size": 112,
         "routed_scaling_factor": 2.5, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "olmo3-window100",
        "olmo3",
        _decoder(256, 352, 4, 4, 2, 64, vocab_size=503, sliding_window=100, rope_parameters=OLMO3_ROPES),
    ),
    ReferenceCheckpoint(
        "seed-oss-biases",
        "seed_oss",
        _decoder(320, 448, 2, 8, 2, 64, vocab_size=1021, attention_bias=True, attention_out_bias=False, mlp_bias=True),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "ministral3-growing-queries",
        "ministral3",
        _decoder(256, 448, 3, 8, 2, 64, vocab_size=503, tie_word_embeddings=True, rope_parameters=MINISTRAL3_ROPE),
    ),
    ReferenceCheckpoint(
        "ernie4-5-biases",
        "ernie4_5",
        _decoder(256, 352, 2, 4, 1, 96, vocab_size=503, use_bias=True, tie_word_embeddings=True),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "hunyuan-alpha",
        "hunyuan_v1_dense",
        _decoder(256, 352, 2, 4, 2, 64, vocab_size=503, rope_parameters=HUNYUAN_ROPE),
    ),
    ReferenceCheckpoint(
        "exaone4-window77",
        "exaone4",
        _decoder(320, 352, 5, 4, 2, 80, vocab_size=503, sliding_window=77, sliding_window_pattern=2),
        dtype="bfloat16",
    ),
    ReferenceCheckpoint(
        "apertus-xielu",
        "apertus",
        _decoder(256, 352, 3, 4, 2, 64, vocab_size=503, attention_bias=True, rope_parameters=LLAMA3_ROPE),
    ),
    ReferenceCheckpoint(
        "ernie4-5-moe-shared",
        "ernie4_5_moe",
        _decoder(256, 352, 4, 4, 2, 64, vocab_size=503, moe_num_experts=12, moe_k=3, moe_intermediate_size=80,
                 moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=2, moe_norm_min=0.2),
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "glm4-moe-groups",
        "glm4_moe",
        _decoder(256, 352, 3, 4, 2, 64, vocab_size=503, n_routed_experts=16, num_experts_per_tok=4,
                 moe_intermediate_size=80, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1,
                 routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True),
        dtype="bfloat16",
        max_shard_size=900_000,
    ),
    ReferenceCheckpoint(
        "minimax-m2-partial-rotary",
        "minimax_m2",
        _decoder(256, 96, 2, 8, 2, 64, vocab_size=503, num_local_experts=12, num_experts_per_tok=3,
                 rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}),
    ),
    ReferenceCheckpoint(
        "glm4-moe-lite",
        "glm4_moe_lite",
        _latent(3, 4, q_lora_rank=96, mlp_layer_types=["dense", "sparse", "sparse"], n_routed_experts=12,
                num_experts_per_tok=3, moe_intermediate_size=96, n_shared_experts=1, n_group=1, topk_group=1,
                routed_scaling_factor=1.8),
        dtype="bfloat16",
    ),
)  # fmt: skip


def by_name(name: str) -> ReferenceCheckpoint:
    """Return the checkpoint called `name`."""
    return next(checkpoint for checkpoint in CHECKPOINTS if checkpoint.name == name)
