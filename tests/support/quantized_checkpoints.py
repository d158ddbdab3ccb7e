"""Quantization of float checkpoints, packed as GPTQ, AWQ or compressed-tensors specify.

This shares no code with `quire.kernels.weights.quantized`: values are packed bit by bit. `write_quantized` also returns
the dequantized weights, and `write_dequantized` writes them as a float checkpoint, to compare the two:

    weights = write_quantized(source, folder / "int4", by_name("gptq-4"))
    write_dequantized(source, folder / "floats", weights)
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_LINEAR = re.compile(r".*\.\d+\..*(_proj|\.c_attn|\.c_proj|\.c_fc)\.weight$")
_SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Quantization and storage format; `group` is -1 for a whole row, `reorder` is act-order.

    `method` is gptq, gptq_v2, awq, pack-quantized or int-quantized; `scales` the safetensors dtype of scales.
    """

    name: str
    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    reorder: bool = False
    indices: bool = True
    scales: str = "F16"


RECIPES = (
    Recipe("gptq-4", "gptq"),
    Recipe("gptq-4-group64", "gptq", group=64, scales="BF16"),
    Recipe("gptq-4-group128-no-indices", "gptq", group=128, indices=False),
    Recipe("gptq-4-channel", "gptq", group=-1),
    Recipe("gptq-4-asymmetric", "gptq", symmetric=False),
    Recipe("gptq-4-asymmetric-reordered", "gptq", symmetric=False, reorder=True),
    Recipe("gptq-4-reordered", "gptq", group=64, reorder=True),
    Recipe("gptq-4-channel-reordered", "gptq", group=-1, reorder=True),
    Recipe("gptq-8", "gptq", bits=8),
    Recipe("gptq-8-asymmetric", "gptq", bits=8, symmetric=False),
    Recipe("gptq_v2-4-asymmetric", "gptq_v2", symmetric=False),
    Recipe("gptq_v2-8-reordered", "gptq_v2", bits=8, reorder=True),
    Recipe("awq", "awq", symmetric=False),
    Recipe("awq-group128", "awq", group=128, symmetric=False),
    Recipe("awq-channel", "awq", group=-1, symmetric=False),
    Recipe("pack-4", "pack-quantized", scales="BF16"),
    Recipe("pack-4-group128-asymmetric", "pack-quantized", group=128, symmetric=False, scales="BF16"),
    Recipe("pack-4-channel", "pack-quantized", group=-1),
    Recipe("pack-4-channel-asymmetric", "pack-quantized", group=-1, symmetric=False, scales="F32"),
    Recipe("pack-4-reordered", "pack-quantized", group=64, reorder=True),
    Recipe("pack-8", "pack-quantized", bits=8, group=128),
    Recipe("pack-8-channel-asymmetric", "pack-quantized", bits=8, group=-1, symmetric=False),
    Recipe("int-8", "int-quantized", bits=8, group=-1, scales="BF16"),
    Recipe("int-8-asymmetric", "int-quantized", bits=8, group=-1, symmetric=False),
    Recipe("int-4", "int-quantized", bits=4, group=32),
)


def by_name(name: str) -> Recipe:
    """Return the recipe called `name`."""
    return next(recipe for recipe in RECIPES if recipe.name == name)


# Files of safetensors, with bf16, which numpy lacks


@dataclasses.dataclass(frozen=True)
class Raw:
    """A tensor as stored in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def to_f32(self) -> Floats:
        """Return the values as f32, in the tensor's shape."""
        if self.dtype == "BF16":
            bits = np.frombuffer(self.data, "<u2").astype("<u4") * np.uint32(65536)
            return bits.view("<f4").reshape(self.shape)
        kind = {"F16": "<f2", "F32": "<f4"}[self.dtype]
        return np.frombuffer(self.data, kind).astype(np.float32).reshape(self.shape)


def raw_floats(values: Floats, dtype: str) -> Raw:
    """Return floats rounded to nearest, ties to even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        rounded = (bits + np.uint32(0x7FFF) + (bits // np.uint32(65536)) % np.uint32(2)) // np.uint32(65536)
        return Raw(dtype, values.shape, rounded.astype("<u2").tobytes())
    return Raw(dtype, values.shape, values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes())


def raw_integers(values: npt.NDArray[Any], dtype: str) -> Raw:
    """Return integers of the safetensors dtype `dtype`."""
    kind = {"I8": "i1", "U8": "u1", "I32": "<i4", "I64": "<i8"}[dtype]
    return Raw(dtype, values.shape, np.ascontiguousarray(values).astype(kind).tobytes())


def load(folder: Path) -> dict[str, Raw]:
    """Load all tensors of a checkpoint folder."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                tensors[name] = Raw(entry["dtype"], tuple(entry["shape"]), content[begin:end])
    return tensors


def save(folder: Path, tensors: dict[str, Raw], config: dict[str, Any]) -> Path:
    """Write a checkpoint with a single file of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder / "model.safetensors", tensors)
    return folder


def save_tensors(file: Path, tensors: dict[str, Raw]) -> None:
    """Write a file of tensors."""
    header, end = {}, 0
    for name, raw in tensors.items():
        begin, end = end, end + len(raw.data)
        header[name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *(raw.data for raw in tensors.values())]))


# Quantization


@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """A matrix [n, k] of unsigned values, with scales and zero points [n, groups] and the group of each input [k]."""

    values: Integers
    scales: Raw
    zeros: Integers
    indices: Integers

    def to_f32(self) -> Floats:
        """Return the dequantized weights; the product is exact in f64, and in f32 too unless the scales are f32."""
        integers = self.values - self.zeros[:, self.indices]
        return (integers * self.scales.to_f32()[:, self.indices].astype(np.float64)).astype(np.float32)


def quantize(weight: Floats, recipe: Recipe, seed: int) -> QuantizedWeights:
    """Round each group to the nearest values; with act-order its inputs are scattered over the row."""
    k = weight.shape[1]
    group = k if recipe.group == -1 else recipe.group
    indices = np.arange(k) // group
    if recipe.reorder:
        indices = indices[np.random.default_rng(seed).permutation(k)]
    top = 2**recipe.bits - 1
    groups = range(indices.max() + 1)
    low = np.stack([weight[:, indices == g].min(axis=1) for g in groups], axis=1).clip(max=0)
    high = np.stack([weight[:, indices == g].max(axis=1) for g in groups], axis=1).clip(min=0)
    if recipe.symmetric:
        high = np.maximum(-low, high)
        low = -high
    scales = raw_floats(np.maximum((high - low) / top, 1e-6).astype(np.float32), recipe.scales)
    steps = scales.to_f32()
    zeros = np.full(steps.shape, 2 ** (recipe.bits - 1)) if recipe.symmetric else np.rint(-low / steps).clip(0, top)
    values = np.rint(weight / steps[:, indices] + zeros[:, indices]).clip(0, top)
    return QuantizedWeights(values.astype(np.int64), scales, zeros.astype(np.int64), indices)


def is_linear(name: str) -> bool:
    """Return True for the weight of a linear layer in one of the model's blocks."""
    return _LINEAR.match(name) is not None


def is_transposed(name: str) -> bool:
    """Return True for GPT-2, whose weights are [inputs, outputs]."""
    return ".c_" in name


# Packing


def pack(values: Integers, bits: int) -> npt.NDArray[np.int32]:
    """Pack rows of values into rows of words, lowest bits first."""
    each = np.unpackbits(values.astype(np.uint8)[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    row = each.reshape(len(values), -1)
    row = np.pad(row, ((0, 0), (0, -row.shape[1] % 32)))
    return np.packbits(row, axis=1, bitorder="little").view("<i4")


def pack_awq(values: Integers) -> npt.NDArray[np.int32]:
    """Pack rows of 4-bit values into rows of words in the order of AWQ."""
    words = np.zeros((len(values), values.shape[1] // 8), np.int64)
    for column in range(words.shape[1]):
        for i in range(8):
            words[:, column] += values[:, 8 * column + AWQ_ORDER[i]] * 16**i
    return words.astype(np.uint32).view(np.int32)


def transposed(raw: Raw) -> Raw:
    """Return the scales, transposed."""
    kind = "<f4" if raw.dtype == "F32" else "<u2"
    return Raw(raw.dtype, raw.shape[::-1], np.frombuffer(raw.data, kind).reshape(raw.shape).T.tobytes())


def gptq(module: str, matrix: QuantizedWeights, recipe: Recipe) -> dict[str, Raw]:
    """Return the tensors of a module, as GPTQModel writes them."""
    zeros = pack(matrix.zeros.T, recipe.bits)
    if recipe.method == "gptq":  # GPTQModel: qzeros -= 0b0001_0001... on int32, which borrows where a zero point is 0
        ones = sum(2**shift for shift in range(0, 32, recipe.bits))
        zeros = ((zeros.astype(np.int64) - ones) % 2**32).astype(np.uint32).view(np.int32)
    tensors = {
        f"{module}.qweight": raw_integers(pack(matrix.values, recipe.bits).T, "I32"),
        f"{module}.qzeros": raw_integers(zeros, "I32"),
        f"{module}.scales": transposed(matrix.scales),
    }
    if recipe.indices:
        tensors[f"{module}.g_idx"] = raw_integers(matrix.indices, "I32")
    return tensors


def awq(module: str, matrix: QuantizedWeights, recipe: Recipe) -> dict[str, Raw]:
    """Return the tensors of a module, as AutoAWQ writes them."""
    return {
        f"{module}.qweight": raw_integers(pack_awq(matrix.values.T), "I32"),
        f"{module}.qzeros": raw_integers(pack_awq(matrix.zeros.T), "I32"),
        f"{module}.scales": transposed(matrix.scales),
    }


def compressed(module: str, matrix: QuantizedWeights, recipe: Recipe) -> dict[str, Raw]:
    """Return the tensors of a module, as compressed-tensors writes them."""
    middle = 2 ** (recipe.bits - 1)
    tensors = {f"{module}.weight_scale": matrix.scales}
    if recipe.method == "int-quantized":
        tensors[f"{module}.weight"] = raw_integers(matrix.values - middle, "I8")
        if not recipe.symmetric:
            tensors[f"{module}.weight_zero_point"] = raw_integers(matrix.zeros - middle, "I8")
        return tensors
    tensors[f"{module}.weight_packed"] = raw_integers(pack(matrix.values, recipe.bits), "I32")
    tensors[f"{module}.weight_shape"] = raw_integers(np.array(matrix.values.shape), "I64")
    if not recipe.symmetric:
        tensors[f"{module}.weight_zero_point"] = raw_integers(pack(matrix.zeros.T, recipe.bits).T, "I32")
    if recipe.reorder:
        tensors[f"{module}.weight_g_idx"] = raw_integers(matrix.indices, "I32")
    return tensors


def quantization_config(recipe: Recipe, floats: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the quantization_config; the modules `floats` are not quantized."""
    if recipe.method in {"gptq", "gptq_v2"}:
        return {
            "quant_method": "gptq", "bits": recipe.bits, "group_size": recipe.group, "sym": recipe.symmetric,
            "desc_act": recipe.reorder, "checkpoint_format": recipe.method, "damp_percent": 0.1,
            "dynamic": {f"-:{re.escape(name)}$": {} for name in floats}, "lm_head": False,
        }  # fmt: skip
    if recipe.method == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": recipe.group, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": list(floats) or None,
        }  # fmt: skip
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    weights = {
        "num_bits": recipe.bits, "type": "int", "symmetric": recipe.symmetric, "dynamic": False,
        "strategy": "channel" if recipe.group == -1 else "group",
        "group_size": None if recipe.group == -1 else recipe.group,
        "actorder": "group" if recipe.reorder else None, "observer": "minmax",
    }  # fmt: skip
    inputs = activations if recipe.method == "int-quantized" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": recipe.method, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", *floats], "kv_cache_scheme": None,
        "sparsity_config": {},
    }  # fmt: skip


# Checkpoints


def write_quantized(source: Path, target: Path, recipe: Recipe, floats: tuple[str, ...] = ()) -> dict[str, Floats]:
    """Write the model of `source` with the linear layers of its blocks quantized, except the modules `floats`.

    Returns the dequantized weights, [outputs, inputs] by their names in `source`.
    """
    packer = {"gptq": gptq, "gptq_v2": gptq, "awq": awq}.get(recipe.method, compressed)
    tensors: dict[str, Raw] = {}
    weights: dict[str, Floats] = {}
    for name, raw in load(source).items():
        module = name.removesuffix(".weight")
        if not is_linear(name) or module in floats:
            tensors[name] = raw
            continue
        block, _, last = module.rpartition(".")
        seed = zlib.crc32(
            f"{block}.{_SAME_INPUT.get(last, last)}".encode()
        )  # one order for layers that share their input
        weight = raw.to_f32()
        matrix = quantize(weight.T if is_transposed(name) else weight, recipe, seed)
        tensors |= packer(module, matrix, recipe)
        weights[name] = matrix.to_f32()
    config = json.loads((source / "config.json").read_text())
    save(target, tensors, {**config, "quantization_config": quantization_config(recipe, floats)})
    _copy_rest(source, target)
    return weights


def write_dequantized(source: Path, target: Path, weights: dict[str, Floats], dtype: str = "F32") -> Path:
    """Write the model of `source` with these weights [outputs, inputs] as floats, exact in F32, else rounded."""
    tensors = load(source)
    for name, weight in weights.items():
        tensors[name] = raw_floats(weight.T if is_transposed(name) else weight, dtype)
    save(target, tensors, json.loads((source / "config.json").read_text()))
    _copy_rest(source, target)
    return target


def _copy_rest(source: Path, target: Path) -> None:
    """Copy the tokenizer and other JSON files."""
    for file in source.glob("*.json"):
        if file.name not in {"config.json", "model.safetensors.index.json"}:
            shutil.copy(file, target / file.name)
