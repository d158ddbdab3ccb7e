"""Small adapters in PEFT's folders, written without PEFT, and the tensors of the base model that they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]

PREFIX = "base_model.model."
QUERY, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"
SHAPES = {f"{QUERY}.weight": (6, 8), f"{DOWN}.weight": (8, 12), f"{HEAD}.weight": (10, 8)}
OTHERS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (10, 8), f"{QUERY}.bias": (6,), "model.norm.weight": (8,),
}  # fmt: skip
RANK = 2
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 3, "target_modules": ["q_proj"],
    "bias": "none", "fan_in_fan_out": False, "use_dora": False, "use_rslora": False, "lora_bias": False,
    "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    "layer_replication": None, "trainable_token_indices": None, "lora_dropout": 0.0, "inference_mode": True,
    "base_model_name_or_path": "org/base",
}  # fmt: skip


def tensors(prefix: str = PREFIX, rank: int = RANK, **parts: tuple[int, ...]) -> Arrays:
    """Return random tensors of the two layers, and further ones of `QUERY`."""
    rng = np.random.default_rng(0)
    made: Arrays = {}
    for module in (QUERY, DOWN):
        outputs, inputs = SHAPES[f"{module}.weight"]
        made[f"{prefix}{module}.lora_A.weight"] = rng.standard_normal((rank, inputs), np.float32)
        made[f"{prefix}{module}.lora_B.weight"] = rng.standard_normal((outputs, rank), np.float32)
    return made | {
        f"{prefix}{QUERY}.{part.replace('__', '.')}": rng.standard_normal(shape, np.float32)
        for part, shape in parts.items()
    }


def renamed(old: str, new: str) -> Arrays:
    """Return the tensors with other names."""
    return {name.replace(old, new): array for name, array in tensors().items()}


def write_adapter(folder: Path, given: Arrays | None = None, **changes: Any) -> Path:
    """Write an adapter with these tensors, and fields that differ from `CONFIG`; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors() if given is None else given, folder / "adapter_model.safetensors")
    return folder
