"""Hadamard transforms of groups of k and of heads, which spread an outlier over its group before it is quantized.

The transform of 2^n values is n stages of sums and differences, so that it is the same on every instruction set. It is
its own inverse but for a factor of the size, by which the weights are divided when they are packed (`quantize` in
native/weights/quantization.h): the product of a transformed row and a transformed column is that of both as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.kernels.emit.builder import LANES, VF32, Builder, Value
from quire.kernels.emit.layout import QuantizedFormat


def rotated_row(
    b: Builder, quantized: QuantizedFormat, width: int, load: Callable[[Value], Value]
) -> Callable[[Value], Value]:
    """Write the transforms of a row's groups to memory; return a function that loads columns 16 i .. 16 i + 15.

    `load(i)` gives those of the row, whose last group is padded with zeros.
    """
    rows, parts, size = b.scratch(quantized.depth(width) * 4), -(-width // LANES), quantized.group // LANES
    for first, stop, count in whole_groups(parts, size):
        with b.each(first, stop) as group:
            rotate_group(b, quantized, group.index, count, load, b.address(rows, group.index * (size * 64)))
    return lambda part: b.load(rows, part * 64, VF32, 64)


def whole_groups(parts: int, size: int) -> list[tuple[int, int, int]]:
    """Return the first and the last + 1 of groups that have `size` parts, and of one that has the rest, with the number
    of their parts."""
    whole, rest = divmod(parts, size)
    return [(0, whole, size), *([(whole, whole + 1, rest)] if rest else [])]


def rotate_group(
    b: Builder, quantized: QuantizedFormat, group: Value, count: int, load: Callable[[Value], Value], target: Value
) -> None:
    """Store the transform of a row's group number `group`, of which there are `count` parts of 16 columns."""
    size = quantized.group // LANES
    vectors = [load(group * size + i) if i < count else b.constant(0.0, VF32) for i in range(size)]
    for i, value in enumerate(_rotated(b, vectors)):
        b.store(value, target, i * 64, 64)


def transform_head(b: Builder, head: Value, dim: int, factor: float = 1.0) -> None:
    """Replace the f32 elements of a head by their transforms times `factor`, in groups of `head_group(dim)`."""
    size = head_group(dim) // LANES
    with b.loop(0, dim // LANES // size) as group:
        first = group.index * (size * 64)
        for i, value in enumerate(_rotated(b, [b.load(head, first + i * 64, VF32, 64) for i in range(size)])):
            b.store(value * factor if factor != 1.0 else value, head, first + i * 64, 64)


def head_group(dim: int) -> int:
    """Return the largest power of two that divides a head's elements, a multiple of 16."""
    return dim & -dim


def _rotated(b: Builder, vectors: Sequence[Value]) -> list[Value]:
    """Return the Hadamard transform of a power of two of vectors of 16 lanes, which follow one another."""
    values = [_rotated_lanes(b, vector) for vector in vectors]
    half = 1
    while half < len(values):
        for i in (i for i in range(len(values)) if not i & half):
            values[i], values[i + half] = values[i] + values[i + half], values[i] - values[i + half]
        half *= 2
    return values


def _rotated_lanes(b: Builder, vector: Value) -> Value:
    half = 1
    while half < LANES:
        other = b.permute(vector, [lane ^ half for lane in range(LANES)])
        order = [lane + LANES if lane & half else lane for lane in range(LANES)]
        vector = b.shuffle(vector + other, other - vector, order)
        half *= 2
    return vector
