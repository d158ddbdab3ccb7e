"""Tables of rotary position embeddings with default, linear, dynamic, yarn, llama3 and longrope scaling (transformers).

Angles are computed in f32 like the reference; their sine and cosine come from our own polynomial in f64, so that they
are the same on every machine. The few frequencies come from libm's f64 `pow`, whose last bit rounding to f32 hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

MAX_POSITIONS = 2**23
"""Most positions for which `sine_cosine` is accurate enough."""

_MOST_REACH = 1 << 53  # of a scaling; far beyond MAX_POSITIONS
_CHECKED_DIM = 64
_LARGEST_NUMBER = 1e300
_SLICE = 4096  # positions whose angles are computed at once

# pi/2 in three parts, the first two of 29 bits, so that n * part is exact for n < 2^24 (Cody and Waite).
_HALF_PI = (1.570796325802803, 9.920935774287987e-10, 2.2517417741562176e-18)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of the first `dim` elements of a head: base `theta`, and the scaling of config.json.

    It rotates the pairs (i, i + dim/2), or (2 i, 2 i + 1) if `interleaved`.
    `extended`: `max_position`, from `max_position_embeddings`, is the length with the scaling, not the one before it.
    """

    dim: int
    theta: float
    kind: str
    scaling: dict[str, Any]
    max_position: int
    extended: bool = False
    interleaved: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig, head_dim: int, partial: bool = False) -> Rope:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Only with `partial`, `partial_rotary_factor` is the part of the head that is rotated; otherwise it must be 1.
        """
        scaling = {**config.options("rope_scaling"), **config.options("rope_parameters")}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if not isinstance(kind, str) or kind not in _FREQUENCIES:
            raise ModelError(f"config.json: rope_type is {kind!r}; supported are {', '.join(_FREQUENCIES)}")
        factor = ModelConfig({**config.fields, **scaling}).get("partial_rotary_factor", 1.0)
        if not partial and factor != 1:
            raise ModelError(f"config.json: partial_rotary_factor is {factor}; this architecture supports only 1")
        scaling.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        rope = cls(int(head_dim * factor), 0.0, kind, scaling, config.size("max_position_embeddings", 2048))
        theta = rope.number("rope_theta")
        if theta <= 1:
            raise ModelError(f"config.json: rope_theta is {theta}; it must be above 1")
        return replace(rope, theta=theta)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a parameter of the scaling, finite and above 0; `default` if it is missing or null."""
        value = self.scaling.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST_NUMBER:
            given = "is missing" if value is None else f"is {value!r}"
            raise ModelError(f"config.json: {name} of rope scaling {self.kind!r} {given}; it must be a number above 0")
        return float(value)

    def factors(self, name: str) -> F64:
        """Return a parameter of the scaling with a number above 0 for each frequency."""
        values = self.scaling.get(name)
        if not isinstance(values, list) or len(values) != self.dim // 2:
            raise ModelError(
                f"config.json: {name} of rope scaling {self.kind!r} must be a list of {self.dim // 2} numbers"
            )
        return np.asarray([replace(self, scaling={name: value}).number(name) for value in values])

    @property
    def original_length(self) -> float:
        """Number of positions that the model was trained for, without scaling."""
        return self.number("original_max_position_embeddings", self.max_position)

    @property
    def reach(self) -> int:
        """Longest sequence that the model supports with its scaling."""
        if self.extended:
            return self.max_position
        if self.kind in ("linear", "dynamic"):
            return int(min(self.max_position * self.number("factor"), _MOST_REACH))
        if self.kind == "yarn":
            return max(self.max_position, int(min(self.original_length * self.number("factor", 1.0), _MOST_REACH)))
        return self.max_position

    def check(self) -> None:
        """Raise ModelError unless the parameters of the scaling are there and give frequencies."""
        small = self if self.kind == "longrope" else replace(self, dim=min(self.dim, _CHECKED_DIM))
        small.frequencies(1)

    def frequencies(self, positions: int) -> tuple[F64, float]:
        """Return f64 [dim / 2], or that for each position, and the factor of attention. Raises ModelError."""
        try:
            with np.errstate(all="ignore"):
                frequencies, factor = _FREQUENCIES[self.kind](self, positions)
        except ModelError:
            raise
        except (ArithmeticError, ValueError):  # a division by zero, a logarithm of zero
            frequencies, factor = np.empty(0), math.inf
        if not (math.isfinite(factor) and ((frequencies >= 0) & (frequencies * positions <= MAX_POSITIONS)).all()):
            raise ModelError(
                f"config.json: rope scaling {self.kind!r} with {self.scaling} gives no angles up to {MAX_POSITIONS}"
            )
        return frequencies, factor

    def table(self, positions: int) -> F32:
        """Return f32 [positions][cos, sin][dim / 2]."""
        frequencies, factor = self.frequencies(positions)
        rows = np.broadcast_to(frequencies.astype(np.float32), (positions, self.dim // 2))
        table = np.empty((positions, 2, self.dim // 2), np.float32)
        for start in range(0, positions, _SLICE):
            part = slice(start, min(start + _SLICE, positions))
            angles = np.arange(part.start, part.stop, dtype=np.float32)[:, None] * rows[part]
            sine, cosine = sine_cosine(angles.astype(np.float64))
            table[part, 0], table[part, 1] = cosine, sine
        return table if factor == 1.0 else table * np.float32(factor)


@dataclass(frozen=True)
class QueryScale:
    """Factors of queries by their positions, as in Llama 4: 1 + beta log(1 + floor(position / length))."""

    beta: float
    length: float

    def table(self, positions: int) -> F32:
        """Return f32 [positions]. Few of the logarithms differ, and rounding hides the last bits of libm's."""
        steps = np.floor(np.arange(positions) / self.length)
        scales: F32 = (1.0 + self.beta * np.log1p(steps)).astype(np.float32)
        return scales


def sine_cosine(angle: F64) -> tuple[F64, F64]:
    """Compute sine and cosine of angles in [0, 2^23] by additions and multiplications only; error below 1e-15."""
    turns = np.rint(angle * (2.0 / math.pi))
    r = ((angle - turns * _HALF_PI[0]) - turns * _HALF_PI[1]) - turns * _HALF_PI[2]
    square = r * r
    sine, cosine = np.zeros_like(r), np.zeros_like(r)
    for n in range(8, -1, -1):  # Taylor on [-pi/4, pi/4]: the first omitted term is below 1e-17
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
    return _inverse(rope) / rope.number("factor"), 1.0


def _dynamic(rope: Rope, positions: int) -> tuple[F64, float]:
    """Compute each position with the base for a sequence that ends there.

    This is what token-by-token decoding gives, and it depends on the position alone, not on chunks.
    """
    factor, original = rope.number("factor"), rope.max_position
    rows = np.repeat(_inverse(rope)[None], min(original, positions), axis=0)
    later = [
        _inverse(rope, rope.theta * (factor * length / original - (factor - 1)) ** (rope.dim / (rope.dim - 2)))
        for length in range(original + 1, positions + 1)
    ]
    return np.concatenate([rows, np.asarray(later)]) if later else rows, 1.0


def _yarn(rope: Rope, positions: int) -> tuple[F64, float]:
    """Compute YaRN (Peng et al. 2023): interpolate low frequencies, keep high ones, and scale attention."""
    original = rope.original_length
    factor = rope.number("factor", rope.max_position / original)
    attention = rope.number("attention_factor", _yarn_attention(rope, factor))
    low, high = (
        rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0))
    )
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0, 1)
    inverse = _inverse(rope)
    return inverse / factor * ramp + inverse * (1 - ramp), attention


def _yarn_attention(rope: Rope, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.scaling.get("mscale") and rope.scaling.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def _llama3(rope: Rope, positions: int) -> tuple[F64, float]:
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ModelError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    inverse = _inverse(rope)
    wavelength = 2 * math.pi / inverse
    smooth = np.clip((rope.number("original_max_position_embeddings") / wavelength - low) / (high - low), 0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse, 1.0


def _longrope(rope: Rope, positions: int) -> tuple[F64, float]:
    """Compute LongRoPE (Ding et al. 2024): each frequency has a factor, one in short and one in long contexts.

    A context beyond the original length has the long factors from its first position on, so that all angles between
    tokens belong to one embedding.
    """
    original = rope.original_length
    short, long = rope.factors("short_factor"), rope.factors("long_factor")
    factor = rope.number("factor", rope.max_position / original)
    if rope.scaling.get("attention_factor") is not None:
        attention = rope.number("attention_factor")
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _inverse(rope) / (long if positions > original else short), attention


_FREQUENCIES: dict[str, Callable[[Rope, int], tuple[F64, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
