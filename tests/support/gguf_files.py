"""GGUF files of the tests' checkpoints, written with the `gguf` package as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf_blocks import random_blocks
from gguf_conversion import conversion_of, is_quantized, keys_of, tensors_of
from gguf_vocabularies import Metadata, byte_level_bpe, word_pieces
from quantized_checkpoints import load
from tokenizers import Tokenizer, models

SPECIAL = {"bos_token_id": 0, "eos_token_id": 4, "eot_token_id": 2}
"""Of the demo model."""


def vocabulary(folder: Path) -> Metadata:
    """Return the metadata of a folder's tokenizer, a byte-level BPE or WordPiece."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if isinstance(backend.model, models.WordPiece):
        return word_pieces(backend)
    return byte_level_bpe(backend, "gpt-2", **SPECIAL, add_bos_token=True)


def write_gguf(
    source: Path, target: Path, kind: str | Callable[[str], str] = "F32", part_tensors: int = 0,
    replaced: dict[str, np.ndarray] | None = None, metadata: Metadata | None = None, dequantized: bool = False,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Write a folder's model as a GGUF file whose matrices are of type `kind`; return what it holds by our names.

    `kind` may tell the type by a matrix' name. Types that the `gguf` package cannot make get random blocks. `replaced`
    are values that take the place of the folder's. With `part_tensors`, the model is divided into files of so many
    tensors, named after `target`. `metadata` are keys besides those of the conversion, or instead of them; `ARCH.`
    stands for the name of the architecture. If `dequantized`, tensors are stored as the values, in F32, that they have
    in type `kind`.
    """
    config = json.loads((source / "config.json").read_text())
    arch = conversion_of(config).architecture
    writer = gguf.GGUFWriter(target, arch, split_max_tensors=part_tensors)
    keys = {f"{arch}.{key}": value for key, value in keys_of(config).items()}
    keys |= {key: value for key, value in vocabulary(source).items() if key != "general.architecture"}
    keys |= {key.replace("ARCH.", f"{arch}."): value for key, value in (metadata or {}).items()}
    held = {name: raw.to_f32() for name, raw in load(source).items()} if replaced is None else replaced
    add_metadata(writer, keys | conversion_of(config).arrays(config, held))
    values = {}
    for stored, name, array in tensors_of(config, held):
        chosen = kind if isinstance(kind, str) else kind(name)
        type_ = gguf.GGMLQuantizationType[chosen if is_quantized(stored, array) else "F32"]
        data, values[name] = _quantized(array, type_)
        if dequantized:
            data, type_ = values[name], gguf.GGMLQuantizationType.F32
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
        n, k = array.shape
        data = random_blocks(kind.name, n, k, deviation=float(array.std()))
    return data, gguf.quants.dequantize(data, kind)


def add_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    """Add keys with the type of their values."""
    for key, value in metadata.items():
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
