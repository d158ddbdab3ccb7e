"""GGUF files of the tests' checkpoints, written with the `gguf` package as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_blocks import random_blocks
from gguf_vocabularies import Metadata, byte_level_bpe
from quantized_checkpoints import load
from tokenizers import Tokenizer

from quire.kernels.gguf.config import ARCHITECTURES

SPECIAL = {"bos_token_id": 0, "eos_token_id": 4, "eot_token_id": 2}
"""Of the demo model."""


def vocabulary(folder: Path) -> Metadata:
    """Return the metadata of a folder's tokenizer, a byte-level BPE."""
    return byte_level_bpe(Tokenizer.from_file(str(folder / "tokenizer.json")), "gpt-2", **SPECIAL, add_bos_token=True)


def write_gguf(
    source: Path, target: Path, kind: str | Callable[[str], str] = "F32", part_tensors: int = 0,
    replaced: dict[str, np.ndarray] | None = None, **metadata: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Write a folder's model as a GGUF file whose matrices are of type `kind`; return what it holds by our names.

    `kind` may tell the type by a matrix' name. Types that the `gguf` package cannot make get random blocks. `replaced`
    are values that take the place of the folder's. With `part_tensors`, the model is divided into files of so many
    tensors, named after `target`. `metadata`, by their last names in the file, take the place of the tokenizer's.
    """
    config = json.loads((source / "config.json").read_text())
    arch = next(name for name, entry in ARCHITECTURES.items() if entry.name == config["architectures"][0])
    writer = gguf.GGUFWriter(target, arch, split_max_tensors=part_tensors)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = {**config, **(config.get("rope_parameters") or {})}
    fields = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }  # fmt: skip
    if rope.get("rope_type", "default") != "default":
        fields |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if "original_max_position_embeddings" in rope:
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    for key, value in {
        **{f"{arch}.{key}": value for key, value in fields.items()},
        **vocabulary(source),
        **metadata,
    }.items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    values = {}
    for name, raw in load(source).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        array = raw.to_f32() if replaced is None else replaced[name]
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            count = heads if "q_proj" in name else config["num_key_value_heads"]
            array = array.reshape(count, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        chosen = kind if isinstance(kind, str) else kind(name)
        type_ = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else chosen]
        data, values[name] = _quantized(array, type_)
        writer.add_tensor(stored, np.ascontiguousarray(data), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _quantized(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    """Return what a tensor of a type stores, and its values."""
    if kind == gguf.GGMLQuantizationType.F32:
        return array, array
    try:
        data = gguf.quants.quantize(array, kind)
    except NotImplementedError:
        data = random_blocks(kind.name, *array.shape, deviation=float(array.std()))
    return data, gguf.quants.dequantize(data, kind)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
