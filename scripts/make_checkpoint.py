"""Write a checkpoint of random weights with the layer shapes of a published model: `--help` lists the shapes.

For measurements where no weights can be downloaded. Fewer layers, experts or tokens make it fit the machine; widths
stay as they are, since the speed of a layer depends on them. The tokenizer knows bytes only.

    .venv/bin/python scripts/make_checkpoint.py qwen3-30b-a3b ~/models/qwen3-moe --layers 6 --experts 64
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.kernels.config import ModelConfig
from quire.kernels.emit.context import Capabilities, EmitContext
from quire.kernels.emit.layout import Dtypes
from quire.kernels.lowering.model import lower
from quire.kernels.models import build_graph
from quire.kernels.operands import Matrix, PlanLimits
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.quantization import Quantization

Shapes = Iterator[tuple[str, tuple[int, ...], str]]
"""Names of tensors, their shapes, and their dtypes in safetensors: BF16 or U8."""

END = "<|endoftext|>"
_STANDARD_DEVIATION = 0.02

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1024,
        "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
        "full_attention_interval": 4, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "granite-4-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 1536,
        "intermediate_size": 512, "shared_intermediate_size": 1024, "num_hidden_layers": 40, "num_local_experts": 64,
        "num_experts_per_tok": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4,
        "position_embedding_type": "nope", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 6.0, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gemma-3n-e2b": {
        "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 10, "hidden_size_per_layer_input": 256,
        "altup_active_idx": 0, "altup_num_inputs": 4, "laurel_rank": 64, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 32768, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "gemma-4-e2b": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 1536,
        "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0,
        "attention_k_eq_v": False, "enable_moe_block": False, "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rope_theta": 150000.0,
        "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
        },
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Fields of config.json by the names of shapes."""


def _gpt_oss_shapes(config: dict[str, Any], layer: str) -> Shapes:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield f"{layer}.mlp.router.weight", (experts, hidden), "BF16"
    yield f"{layer}.mlp.router.bias", (experts,), "BF16"
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield f"{layer}.mlp.experts.{name}_blocks", (experts, outputs, inputs // 32, 16), "U8"
        yield f"{layer}.mlp.experts.{name}_scales", (experts, outputs, inputs // 32), "U8"
        yield f"{layer}.mlp.experts.{name}_bias", (experts, outputs), "BF16"


def _granite_shapes(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Shapes:
    """Yield the tensors under the names of Granite's checkpoints, which stack the experts."""
    experts = config["num_local_experts"]
    for name, shape in shapes.items():
        layer, _, part = name.partition("mlp.experts.")
        number, _, projection = part.partition(".")
        at = f"{layer}block_sparse_moe"
        if not part:
            yield name.replace("mlp.gate.", "block_sparse_moe.router.layer."), shape, "BF16"
        elif number == "0" and projection == "down_proj.weight":
            yield f"{at}.output_linear.weight", (experts, *shape), "BF16"
        elif number == "0" and projection == "up_proj.weight":
            yield f"{at}.input_linear.weight", (experts, 2 * shape[0], shape[1]), "BF16"


def all_shapes(config: dict[str, Any]) -> Shapes:
    """Yield all tensors of a model, as its plan reads them; those of experts in MXFP4 instead of their floats."""
    checkpoint = Checkpoint.__new__(Checkpoint)  # of which only the configuration is read
    checkpoint.config, checkpoint.folder = config, Path()
    context = EmitContext(Capabilities("avx2", "f32"), Dtypes("bf16", "bf16", "f32"))
    graph = build_graph(ModelConfig(config))
    plan = lower(graph, context, PlanLimits(32, min(graph.max_positions, 1024), 32), Quantization(checkpoint))
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in plan.weights:
        shapes |= {part.tensor: part.shape for part in weight.parts} if isinstance(weight, Matrix) else weight.tensors
    if config["model_type"] == "granitemoehybrid":
        yield from _granite_shapes(config, shapes)
        return
    is_packed = config["model_type"] == "gpt_oss"
    yield from ((name, shape, "BF16") for name, shape in shapes.items() if not (is_packed and ".mlp." in name))
    for i in range(config["num_hidden_layers"] if is_packed else 0):
        yield from _gpt_oss_shapes(config, f"model.layers.{i}")


def random_tensor(random: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Return random values: norms and scalars around 1, exponents of MXFP4 around 2^-7, bits of BF16 as u16."""
    if name.endswith("_scales"):
        return random.integers(118, 123, shape, np.uint8)
    if dtype == "U8":
        return random.integers(0, 256, shape, np.uint8)
    values = random.standard_normal(shape, np.float32) * np.float32(_STANDARD_DEVIATION)
    if name.endswith(("norm.weight", "layer_scalar", "output_scale")):
        values += 1
    return (values.view("<u4") >> 16).astype("<u2")


def write_weights(folder: Path, config: dict[str, Any], seed: int) -> int:
    """Write model.safetensors, one tensor after the other, and return its bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape, dtype in all_shapes(config):
        begin, end = end, end + math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    random = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype in all_shapes(config):
            file.write(random_tensor(random, name, shape, dtype).tobytes())
    return end


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer with a single merge, without which converters fail; token 0 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([END, *alphabet, "th"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def chosen_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the fields of a model of so many layers; as large a part of them as ever reads the KV of others."""
    layers, fields = range(count), {"num_hidden_layers": count}
    if config["model_type"] == "gpt_oss":
        return fields | {"layer_types": [("sliding_attention", "full_attention")[i % 2] for i in layers]}
    if config["model_type"] == "granitemoehybrid":
        return fields | {"layer_types": ["attention" if i % 10 == 5 else "mamba" for i in layers]}
    if config["model_type"] in ("gemma3n_text", "gemma4_text"):
        sparse = {"activation_sparsity_pattern": [0.95 if i < 10 else 0.0 for i in layers]}
        sparsity = sparse if config["model_type"] == "gemma3n_text" else {}
        kinds = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in layers]
        shared = config["num_kv_shared_layers"] * count // config["num_hidden_layers"]
        own = 5  # at least: one layer of each kind
        return fields | {"layer_types": kinds, "num_kv_shared_layers": max(0, min(shared, count - own))} | sparsity
    return fields


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="number of layers; by default the model's")
    parser.add_argument("--experts", type=int, help="number of experts; by default the model's")
    parser.add_argument("--vocab-size", type=int, default=32000, help="number of tokens (default 32000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }
    config |= SHAPES[arguments.shape] | {"vocab_size": arguments.vocab_size}
    if "hidden_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = arguments.vocab_size
    experts = next((name for name in ("num_experts", "num_local_experts") if name in config), None)
    if arguments.experts is not None and experts is None:
        parser.error(f"--experts {arguments.experts}: {arguments.shape} has none")
    config |= chosen_layers(config, arguments.layers or config["num_hidden_layers"])
    if experts is not None:
        config[experts] = arguments.experts or config[experts]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tokenizer(arguments.folder)
    size = write_weights(arguments.folder, config, arguments.seed)
    print(f"{arguments.folder}: {size / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
