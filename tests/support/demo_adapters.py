"""Random adapters of the demo model, whose answers differ from its own and from one another's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from adapter_files import CONFIG, write_adapter

from quire.frontend.engine_args import DEMO_MODEL

RANK = 4


def write_demo_adapter(folder: Path, seed: int, rank: int = RANK, *, head: bool = False) -> Path:
    """Write an adapter of the attention and of the feed-forward layers, and of the head and the embedding if `head`;
    return its folder."""
    model = json.loads((Path(DEMO_MODEL) / "config.json").read_text())
    hidden, rng = model["hidden_size"], np.random.default_rng(seed)
    sizes = {
        "self_attn.q_proj": (model["num_attention_heads"] * model["head_dim"], hidden),
        "self_attn.v_proj": (model["num_key_value_heads"] * model["head_dim"], hidden),
        "mlp.down_proj": (hidden, model["intermediate_size"]),
    }
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (outputs, inputs) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = 0.1 * rng.standard_normal((rank, inputs), np.float32)
            tensors[f"{module}.lora_B.weight"] = 0.1 * rng.standard_normal((outputs, rank), np.float32)
    if head:
        vocabulary, at = model["vocab_size"], "base_model.model"
        shapes = {
            f"{at}.lm_head.lora_A.weight": (rank, hidden),
            f"{at}.lm_head.lora_B.weight": (vocabulary, rank),
            f"{at}.model.embed_tokens.lora_embedding_A": (rank, vocabulary),
            f"{at}.model.embed_tokens.lora_embedding_B": (hidden, rank),
        }
        tensors |= {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return write_adapter(folder, tensors, r=rank, lora_alpha=2 * rank, target_modules=[*CONFIG["target_modules"]])
