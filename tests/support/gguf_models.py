"""Models of GGUF files without a file: metadata and tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import gguf
import numpy as np

from quire.kernels.gguf.container import GgufModel, GgufTensor

METADATA: dict[str, Any] = {
    "general.architecture": "qwen3", "qwen3.block_count": 2, "qwen3.context_length": 4096,
    "qwen3.embedding_length": 64, "qwen3.feed_forward_length": 96, "qwen3.attention.head_count": 4,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.eot_token_id": 5,
}  # fmt: skip
EMBEDDING = gguf.quants.quantize(np.ones((9, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)


def model(**changes: Any) -> GgufModel:
    """Return a model without layers, with these keys of the architecture changed."""
    changed = {f"qwen3.{key.replace('__', '.')}": value for key, value in changes.items()}
    tensor = gguf_tensor("token_embd.weight", "Q8_0", (9, 64), EMBEDDING)
    return GgufModel({**METADATA, **changed}, {tensor.name: tensor}, {}, {})


def gguf_tensor(name: str, kind: str, shape: tuple[int, ...], data: np.ndarray) -> GgufTensor:
    return GgufTensor(name, kind, shape, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def added(given: GgufModel, *tensors: Any) -> GgufModel:
    """Return a model with more tensors."""
    return dataclasses.replace(given, tensors=given.tensors | {tensor.name: tensor for tensor in tensors})


def zeros(name: str, *shape: int) -> GgufTensor:
    """Return a tensor of F32."""
    return gguf_tensor(name, "F32", shape, np.zeros(shape, np.float32))
