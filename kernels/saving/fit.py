"""The quantization of float weights to integers with a scale, and maybe a zero point, for each group of inputs.

A weight is `(value - zero) * scale`, with scales that bf16 holds. Scales and zero points are searched: the range of a
group is narrowed by steps, zero points beside the nearest are tried, and the scale that fits the values best, by least
squares. Errors count by the importance of their inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_NARROWED = (1.0, 0.92, 0.84, 0.76)
"""Parts of a group's range that are tried. More of them, or more rounds, make errors smaller by less than 0.5 %."""

_ROUNDS = 2
"""Scales that are fitted to the values found with the scale before."""


@dataclass(frozen=True)
class Fitted:
    """Weights of n outputs and k inputs: `values` u8 [n, k], `scales` f32 [n, groups], `zeros` u8 [n, groups]."""

    values: npt.NDArray[np.uint8]
    scales: Floats
    zeros: npt.NDArray[np.uint8]


def fit(weights: Floats, importance: Floats | None, bits: int, group: int) -> Fitted:
    """Quantize weights, f32 [n, k], with errors that count by `importance`, f32 [k], all alike if it is None.

    With 8 bits the zero points are all 128, as formats without any have them.
    """
    n, k = weights.shape
    grouped = weights.reshape(n, k // group, group)
    counts = np.ones(k, np.float32) if importance is None else importance
    search = _Search(grouped, counts.reshape(1, k // group, group), bits)
    for narrowed in _NARROWED if bits < 8 else (1.0,):
        for shift in (0, -1, 1) if bits < 8 else (0,):
            search.consider(narrowed, shift)
    return Fitted(search.values.reshape(n, k), search.scales[..., 0], search.zeros[..., 0].astype(np.uint8))


class _Search:
    """The best quantization so far of each group of `weights`, f32 [n, groups, group]."""

    def __init__(self, weights: Floats, counts: Floats, bits: int) -> None:
        self._weights, self._counts, self._bits, self._most = weights, counts, bits, (1 << bits) - 1
        shape = (*weights.shape[:2], 1)
        self.values = np.zeros(weights.shape, np.uint8)
        self.scales, self.zeros = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        self._errors = np.full(shape, np.inf, np.float32)

    def consider(self, narrowed: float, shift: int) -> None:
        """Try a part of each group's range with a shifted zero point, and scales that fit what is found with it."""
        scales, zeros = self._range(narrowed)
        zeros = np.clip(zeros + np.float32(shift), 0, self._most)
        values = self._round(scales, zeros)
        self._keep(values, scales, zeros)
        for _ in range(_ROUNDS):
            offsets = values - zeros
            weighted = offsets * self._counts
            size = (weighted * offsets).sum(axis=-1, keepdims=True)
            fitted = (weighted * self._weights).sum(axis=-1, keepdims=True) / np.where(size > 0, size, 1)
            scales = to_bf16(np.where(fitted > 0, fitted, scales))
            values = self._round(scales, zeros)
            self._keep(values, scales, zeros)

    def _range(self, narrowed: float) -> tuple[Floats, Floats]:
        """Return the scale and the zero point of each group for a part of its range; zero is always in it."""
        if self._bits == 8:
            scales = np.abs(self._weights).max(axis=-1, keepdims=True) * np.float32(narrowed / 127)
            zeros = np.full(scales.shape, 128, np.float32)
        else:
            low = np.minimum(self._weights.min(axis=-1, keepdims=True), 0)
            high = np.maximum(self._weights.max(axis=-1, keepdims=True), 0)
            scales = (high - low) * np.float32(narrowed / self._most)
            zeros = np.rint(-low * np.float32(narrowed) / np.where(scales > 0, scales, 1))
        scales = to_bf16(scales)
        return np.where(scales > 0, scales, np.float32(1)), zeros

    def _round(self, scales: Floats, zeros: Floats) -> Floats:
        values: Floats = np.clip(np.rint(self._weights / scales) + zeros, 0, self._most)
        return values

    def _keep(self, values: Floats, scales: Floats, zeros: Floats) -> None:
        """Keep what has a smaller error than what has been found before."""
        differences = (values - zeros) * scales - self._weights
        errors = (differences * differences * self._counts).sum(axis=-1, keepdims=True)
        better = errors < self._errors
        np.copyto(self.values, values.astype(np.uint8), where=better)
        np.copyto(self.scales, scales, where=better)
        np.copyto(self.zeros, zeros, where=better)
        np.copyto(self._errors, errors, where=better)


def to_bf16(values: Floats) -> Floats:
    """Round to the nearest numbers that bf16 has, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: Floats = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def bf16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Return what bf16 stores of values, rounded to the nearest, ties to even."""
    return (to_bf16(values).view(np.uint32) >> 16).astype(np.uint16)
