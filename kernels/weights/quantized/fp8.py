"""FP8 checkpoints: how config.json describes them, and the values of their weights.

A weight is a code of float8 e4m3fn (Micikevicius et al. 2022: 4 bits of exponent, 3 of mantissa, no infinities) times
an f32 or bf16 scale. With `quant_method` "fp8" (DeepSeek, Qwen3-FP8, AutoFP8) and "fbgemm_fp8" the scale of `X.weight`
is `X.weight_scale_inv` for blocks, which is multiplied in spite of its name, or `X.weight_scale` for the whole tensor
or each output; compressed-tensors calls all of them `X.weight_scale`.

Products of a code and a scale are not exact in bf16. They are computed in f32, and rounded once to whatever number
format the model is computed in: bf16, float32, or that of `--quantization`. Activations are not quantized, so their
scales have no use. Modules that are left in floats show that by the dtypes of their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError

METHODS = ("fp8", "fbgemm_fp8")
"""Values of `quant_method`, besides compressed-tensors."""

COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")
"""Values of `format` of compressed-tensors."""

STRATEGIES = ("tensor", "channel", "block")
_ROWS = 128  # that are dequantized at once, so that they stay in the cache
_LARGEST_BLOCK = 1 << 16


def _values() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[codes & 127 == 127] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


VALUES = _values()
"""Values of the codes, f32 [256]."""


@dataclass(frozen=True)
class Fp8:
    """FP8 format of a checkpoint; `block` is the outputs and inputs that share a scale where scales are of blocks."""

    block: tuple[int, int] | None

    @classmethod
    def from_config(cls, section: ModelConfig) -> Fp8:
        """Read `quantization_config`. Raises ModelError for a format that is not supported."""
        if section.fields.get("quant_method") not in METHODS:
            return cls(_compressed_block(section))
        section.restrict("fmt", ("e4m3", "float8_e4m3fn"))
        section.restrict("activation_scheme", ("dynamic", "static"))
        section.restrict("kv_cache_scheme", ({},))
        return cls(_block(section, "weight_block_size"))

    def scales(self, name: str, scales: npt.NDArray[np.float32], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return scales as a grid over a matrix: of shape [1, 1], [n, 1] or blocks. Raises ModelError."""
        n, k = shape
        forms = {(1,): (1, 1), (): (1, 1), (n,): (n, 1), (n, 1): (n, 1)}
        if self.block is not None:
            rows, columns = self.block
            grid = -(-n // rows), -(-k // columns)
            forms[grid] = grid
        if scales.shape not in forms:
            raise ModelError(
                f"tensor {name} has shape {list(scales.shape)}; for weights of shape {[n, k]} in blocks of "
                f"{self.block} it must be one of {', '.join(str(list(form)) for form in forms)}"
            )
        if not np.isfinite(scales).all():
            raise ModelError(f"tensor {name} holds an infinity or a NaN; the checkpoint may be damaged")
        return scales.reshape(forms[scales.shape])

    def dequantize(
        self, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], first: int, count: int
    ) -> npt.NDArray[np.float32]:
        """Return `count` rows, from number `first` on, of the products of codes u8 [n, k] and a grid of scales: f32.

        Raises ValueError for a NaN.
        """
        n, k = codes.shape
        rows, columns = {(1, 1): (n, k), (n, 1): (1, k)}.get(scales.shape) or self.block or (n, k)
        out = np.empty((count, k), np.float32)
        for start in range(0, count, _ROWS):
            part = out[start : start + _ROWS]
            numbers = np.arange(first + start, first + start + len(part))
            # All codes are in the table; the default mode would fill a copy of `out` first.
            np.take(VALUES, codes[first + start : first + start + len(part)], out=part, mode="clip")
            part *= _wide(scales[numbers // rows], columns, k)
        if np.isnan(out).any():
            raise ValueError("it holds a NaN (code 0x7f or 0xff); the checkpoint may be damaged")
        return out


def _wide(scales: npt.NDArray[np.float32], columns: int, k: int) -> npt.NDArray[np.float32]:
    """Return scales [rows, blocks] as [rows, k], or [rows, 1] where a scale is of the whole row."""
    return scales if scales.shape[1] == 1 else np.repeat(scales, columns, axis=1)[:, :k]


def fp8_of(fields: dict[str, Any]) -> Fp8 | None:
    """Return the FP8 format that a config.json states, None if it states none. Raises ModelError."""
    for name in ("quantization_config", "compression_config"):
        section = fields.get(name)
        if isinstance(section, dict) and is_fp8(section):
            return Fp8.from_config(ModelConfig(section, f"{name}."))
    return None


def is_fp8(section: dict[str, Any]) -> bool:
    """Return True if `quantization_config` states FP8."""
    method = section.get("quant_method")
    return method in METHODS or (method == "compressed-tensors" and section.get("format") in COMPRESSED_FORMATS)


def _compressed_block(section: ModelConfig) -> tuple[int, int] | None:
    """Return the size of blocks in the config groups of compressed-tensors, None if no scale is of blocks."""
    section.restrict("kv_cache_scheme", ({},))
    section.restrict("transform_config", ({},))
    section.restrict("quantization_status", ("compressed",))
    section.section("sparsity_config").restrict("format", ("dense",))
    groups, blocks = section.section("config_groups"), set()
    for name in groups.fields:
        weights = groups.section(name).section("weights")
        weights.choice("type", ("float",))
        weights.choice("num_bits", (8,))
        weights.restrict("dynamic", (False,))
        weights.restrict("symmetric", (True,))
        if weights.choice("strategy", STRATEGIES, "tensor") == "block":
            blocks.add(_block(weights, "block_structure"))
    if len(blocks) > 1:
        raise ModelError(f"config.json: {groups.path[:-1]} have blocks of several sizes; they must have the same")
    return blocks.pop() if blocks else None


def _block(section: ModelConfig, name: str) -> tuple[int, int] | None:
    size = section.fields.get(name)
    if size is None:
        return None
    if isinstance(size, list) and len(size) == 2 and all(type(s) is int and 0 < s <= _LARGEST_BLOCK for s in size):
        return size[0], size[1]
    raise ModelError(
        f"config.json: {section.path}{name} is {repr(size)[:40]}; it must be two sizes from 1 to {_LARGEST_BLOCK}, of "
        "outputs and inputs"
    )
