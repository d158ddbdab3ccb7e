"""Tables of rotary position embeddings: default, linear, dynamic, yarn and llama3 scaling, as transformers has them.

Angles are formed in f32 as the reference does; their sine and cosine come from our own polynomial in f64, so that the
tables, and with them the bits of every token, are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

# pi/2 in three parts, the first two of 29 bits, so that n * part is exact for n < 2^24 (Cody and Waite).
_HALF_PI = (1.570796325802803, 9.920935774287987e-10, 2.2517417741562176e-18)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embeddings of a model: `dim` elements of a head, base `theta`, and the scaling of config.json."""

    dim: int
    theta: float
    kind: str
    scaling: dict[str, Any]
    max_position: int

    @classmethod
    def from_config(cls, config: ModelConfig, dim: int) -> Rope:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        scaling = {**config.options("rope_scaling"), **config.options("rope_parameters")}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in _FREQUENCIES:
            raise ModelError(f"config.json: rope_type is {kind!r}; supported are {', '.join(_FREQUENCIES)}")
        if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1:
            raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
        theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
        return cls(dim, float(theta), kind, scaling, config.size("max_position_embeddings", 2048))

    def table(self, positions: int) -> F32:
        """f32 [positions][cos, sin][dim / 2]."""
        try:
            frequencies, factor = _FREQUENCIES[self.kind](self, positions)
        except KeyError as error:
            raise ModelError(f"config.json: rope scaling {self.kind!r} lacks {error.args[0]!r}") from None
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
        sine, cosine = sine_cosine(angles.astype(np.float64))
        table = np.stack([cosine, sine], axis=1).astype(np.float32)
        return table if factor == 1.0 else table * np.float32(factor)


def sine_cosine(angle: F64) -> tuple[F64, F64]:
    """Sine and cosine of angles in [0, 2^23], by additions and multiplications only; error below 1e-15."""
    turns = np.rint(angle * (2.0 / math.pi))
    r = ((angle - turns * _HALF_PI[0]) - turns * _HALF_PI[1]) - turns * _HALF_PI[2]
    square = r * r
    sine, cosine = np.zeros_like(r), np.zeros_like(r)
    for n in range(8, -1, -1):  # Taylor on [-pi/4, pi/4]: the first term left out is below 1e-17
        sine = sine * square + (-1.0) ** n / math.factorial(2 * n + 1)
        cosine = cosine * square + (-1.0) ** n / math.factorial(2 * n)
    sine = sine * r
    quadrant = turns.astype(np.int64) & 3
    swapped = (quadrant & 1).astype(bool)
    s, c = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    return np.where(quadrant >= 2, -s, s), np.where((quadrant == 1) | (quadrant == 2), -c, c)


def _inverse(rope: Rope, theta: float | None = None) -> F64:
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    return np.asarray([1.0 / (theta or rope.theta) ** float(e) for e in exponents])


def _default(rope: Rope, positions: int) -> tuple[F64, float]:
    return _inverse(rope), 1.0


def _linear(rope: Rope, positions: int) -> tuple[F64, float]:
    return _inverse(rope) / float(rope.scaling["factor"]), 1.0


def _dynamic(rope: Rope, positions: int) -> tuple[F64, float]:
    """Each position by the base for a sequence that ends there: what token-by-token decoding gives, and a function
    of the position alone, so that chunks don't change it."""
    factor = float(rope.scaling["factor"])
    original = int(rope.scaling.get("original_max_position_embeddings") or rope.max_position)
    rows = np.repeat(_inverse(rope)[None], min(original, positions), axis=0)
    later = [
        _inverse(rope, rope.theta * (factor * length / original - (factor - 1)) ** (rope.dim / (rope.dim - 2)))
        for length in range(original + 1, positions + 1)
    ]
    return np.concatenate([rows, np.asarray(later)]) if later else rows, 1.0


def _yarn(rope: Rope, positions: int) -> tuple[F64, float]:
    """YaRN (Peng et al. 2023): interpolates low frequencies, keeps high ones, and scales attention."""
    s = rope.scaling
    original = float(s.get("original_max_position_embeddings") or rope.max_position)
    factor = float(s["factor"]) if "factor" in s else rope.max_position / original
    attention = s.get("attention_factor")
    if attention is None:
        attention = _yarn_attention(factor, s.get("mscale"), s.get("mscale_all_dim"))
    low, high = (
        rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (float(s.get("beta_fast") or 32), float(s.get("beta_slow") or 1))
    )
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0, 1)
    inverse = _inverse(rope)
    return inverse / factor * ramp + inverse * (1 - ramp), float(attention)


def _yarn_attention(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _llama3(rope: Rope, positions: int) -> tuple[F64, float]:
    s = rope.scaling
    factor, low, high = float(s["factor"]), float(s["low_freq_factor"]), float(s["high_freq_factor"])
    original = float(s["original_max_position_embeddings"])
    inverse = _inverse(rope)
    wavelength = 2 * math.pi / inverse
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse, 1.0


_FREQUENCIES: dict[str, Callable[[Rope, int], tuple[F64, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
