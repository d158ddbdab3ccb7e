"""Random blocks of GGUF's quantized types; the `gguf` package, which computes their values, can make few of them."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Offsets of the f16 numbers of a block."""


def random_blocks(kind: str, n: int, k: int, seed: int = 0, deviation: float = 0.0) -> npt.NDArray[np.uint8]:
    """Return the bytes of a matrix [n, bytes], random but for scales, which are of either sign.

    With `deviation`, scales are such that the values have about that standard deviation.
    """
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng([seed, n, k])
    blocks = rng.integers(0, 256, (n, k // elements, size), np.uint8)
    scales = rng.uniform(1e-3, 1e-2, (len(HALVES[kind]), *blocks.shape[:2]))
    scales *= rng.choice([-1, 1], scales.shape)
    factor = 1.0
    for _ in range(2 if deviation else 1):
        for offset, values in zip(HALVES[kind], scales * factor, strict=True):
            blocks[:, :, offset : offset + 2] = values.astype("<f2")[..., None].view(np.uint8)
        factor = deviation / dequantized(kind, blocks.reshape(n, -1)).std() if kind != "MXFP4" else 1.0
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(115, 125, blocks.shape[:2])
    return blocks.reshape(n, -1)


def dequantized(kind: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values as the `gguf` package computes them, f32 [n, k]."""
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return values
