"""A checkpoint of 2 layers with random weights, for tests that modify it; needs neither torch nor a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def weights() -> dict[str, np.ndarray]:
    """Return all tensors of the model that `CONFIG` describes."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (64, 64) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (64, 96)
        shapes |= {f"{prefix}{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] = CONFIG) -> Path:
    """Write a checkpoint with a single file of tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
