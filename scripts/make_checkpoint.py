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


def attention_shapes(config: dict[str, Any], layer: str) -> Shapes:
    """Yield the tensors of an attention layer and of both norms."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    for name, shape in (("q", (query, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, query))):
        yield f"{layer}.self_attn.{name}_proj.weight", shape, "BF16"
        if config.get("attention_bias"):
            yield f"{layer}.self_attn.{name}_proj.bias", shape[:1], "BF16"
    if config["model_type"].startswith("qwen3"):
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", (dim,), "BF16"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}.{name}.weight", (hidden,), "BF16"


def feed_forward_shapes(config: dict[str, Any], layer: str) -> Shapes:
    """Yield the tensors of a feed-forward layer, dense or of experts."""
    hidden, mlp = config["hidden_size"], f"{layer}.mlp"
    if config["model_type"] == "gpt_oss":
        yield from _gpt_oss_shapes(config, layer)
        return
    modules, inner = [mlp], config["intermediate_size"]
    if "num_experts" in config:
        modules, inner = [f"{mlp}.experts.{i}" for i in range(config["num_experts"])], config["moe_intermediate_size"]
        yield f"{mlp}.gate.weight", (len(modules), hidden), "BF16"
    for module in modules:
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield f"{module}.{name}_proj.weight", shape, "BF16"


def _gpt_oss_shapes(config: dict[str, Any], layer: str) -> Shapes:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield f"{layer}.self_attn.sinks", (config["num_attention_heads"],), "BF16"
    yield f"{layer}.mlp.router.weight", (experts, hidden), "BF16"
    yield f"{layer}.mlp.router.bias", (experts,), "BF16"
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield f"{layer}.mlp.experts.{name}_blocks", (experts, outputs, inputs // 32, 16), "U8"
        yield f"{layer}.mlp.experts.{name}_scales", (experts, outputs, inputs // 32), "U8"
        yield f"{layer}.mlp.experts.{name}_bias", (experts, outputs), "BF16"


def all_shapes(config: dict[str, Any]) -> Shapes:
    """Yield all tensors of a model."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden), "BF16"
    for i in range(config["num_hidden_layers"]):
        yield from attention_shapes(config, f"model.layers.{i}")
        yield from feed_forward_shapes(config, f"model.layers.{i}")
    yield "model.norm.weight", (hidden,), "BF16"
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden), "BF16"


def random_tensor(random: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Return random values: norms around 1, exponents of MXFP4 around 2^-7, bits of BF16 as u16."""
    if name.endswith("_scales"):
        return random.integers(118, 123, shape, np.uint8)
    if dtype == "U8":
        return random.integers(0, 256, shape, np.uint8)
    values = random.standard_normal(shape, np.float32) * np.float32(_STANDARD_DEVIATION)
    if name.endswith("norm.weight"):
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
    experts = next((name for name in ("num_experts", "num_local_experts") if name in config), None)
    if arguments.experts is not None and experts is None:
        parser.error(f"--experts {arguments.experts}: {arguments.shape} has none")
    config["num_hidden_layers"] = arguments.layers or config["num_hidden_layers"]
    if experts is not None:
        config[experts] = arguments.experts or config[experts]
    if config["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[i % 2] for i in range(config["num_hidden_layers"])]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tokenizer(arguments.folder)
    size = write_weights(arguments.folder, config, arguments.seed)
    print(f"{arguments.folder}: {size / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
