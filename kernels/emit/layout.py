"""Memory layouts and dtypes of weights, activations and KV pages.

**Packed weights** `w[n, k]` (and K and V in their pages): blocks of 32 columns n by 32 of k, each of two tiles of 16
columns; a tile holds 16 pairs of k, each pair 16 columns by (even k, odd k). In bf16 a pair is one 64-byte line, AMX's
B operand: `[n/32][k/32][2][16 pairs][16 n][2 k]`. In f32 the even and odd halves are separate, so both load as whole
vectors: `[n/32][k/32][2][16 pairs][2 k][16 n]`. int8, used in KV pages, has the layout of f32. Paired weights are bf16
whose lines hold (k + 2, k), then (k + 3, k + 1): `[n/32][k/32][2][8 fours][2 parities][16 n][2 k]`; see products.py.

**Packed activations** `x[m, k]`, the inputs of a product: `[m/16][k/32][16][32]`, AMX's A operand. Paired activations,
the operand of `vdpbf16ps`, are bf16 with each four of k as (2, 0), (3, 1): see products.py.

**Packed quantized weights**: blocks of 32 columns n, each a sequence of groups along k. A group has the scales of its
32 columns, their zero points or minima if it has any, then its values in lines of 64 bytes, alternating between two
tiles of 16 columns. Each unit of 32 k has a plane for the low bits of its values and maybe another one for the rest: 8
bits are one plane, 6 are 4 + 2, 5 are 4 + 1, 3 are 2 + 1. A plane of p bits is `[p lines][2][16 n][4 bytes]`; byte b of
a line holds element b of each of its fours of k, the first four in the lowest bits. So int8 is `[k/4][2][16 n][4 k]`,
and in int4 a byte holds k in its low and k + 4 in its high half: the operand of VNNI and, with a stride of 128 bytes,
of AMX. Values are offset binary, w = (value - zero) * scale, or with minima w = value * scale - minimum.

Super scales are those of 256 k at a time: an f16 for each column, and with minima another one; then a signed byte for
each group and column, and an unsigned one for its minimum; then the values of all groups. A scale is the product of
both, exact in f32; the last 256 k may have fewer groups. The e8m0 scales of two groups, a byte each, fill a line; their
values follow.

**Quantized activations**: panels of 16 rows; a panel holds `[k/64][16][64]` int8, then for each group the scales (f32)
and the sums (int32) of its 16 rows, in groups of 32 also the sums of the first 16 elements. Weights in groups of 16
share the activations of those in groups of 32. Both are Hadamard transforms where a format is rotated (rotation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.kernels import _native
from quire.kernels.emit.builder import (
    BF16,
    F32,
    I8,
    I16,
    I32,
    LANES,
    VF32,
    VI32,
    Builder,
    Value,
    lanes_of,
    vector,
    with_element,
)
from quire.kernels.emit.math import round_bf16, upper_half

BLOCK = _native.PACKED_BLOCK
"""Columns of a packed block, and the k of one accumulation of the numeric contract."""
TILE_ROWS = _native.TILE_ROWS
PAIRS = _native.TILE_PAIRS

QuantizedFormat = _native.QuantizedFormat

PAIRED = "bf16-paired"
"""Storage as bf16 for `vdpbf16ps`: activations in the order of PAIRED_ORDER, weights in pairs of even or of odd k."""
PAIRED_ORDER = (2, 0, 3, 1)
"""Order in which four consecutive k are stored."""

ELEMENT_BYTES = {I8: 1, BF16: 2, PAIRED: 2, F32: 4}


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of a model's kernels.

    `weights`: storage of packed weights, PAIRED where products are `vdpbf16ps`. `rounding`: what activations are
    rounded to before a product (bf16, or f32 for no rounding). `activations`: storage of the rounded values; f32 where
    products are FMAs, so that they load by broadcast, bf16 where they are AMX tiles, PAIRED where they are
    `vdpbf16ps`. `quantized_kv`: KV pages hold int8, with a scale for each token and head.
    """

    weights: str
    rounding: str
    activations: str
    quantized_kv: bool = False

    @property
    def kv(self) -> Dtypes:
        """Dtypes of products with KV pages, whose layout is the same on all hosts."""
        if self.quantized_kv:
            return replace(self, weights=I8)
        return self.plain

    @property
    def plain(self) -> Dtypes:
        """Dtypes with weights whose layout is the same on all hosts."""
        return replace(self, weights=BF16) if self.weights == PAIRED else self

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of 16 columns by 32 k."""
        return TILE_ROWS * BLOCK * ELEMENT_BYTES[self.weights]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 32 columns by 32 k."""
        return 2 * self.tile_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of one element of activations."""
        return ELEMENT_BYTES[self.activations]


def load_pair(b: Builder, dtypes: Dtypes, tile: Value, pair: Value) -> tuple[Value, Value]:
    """Load the even and the odd k of one pair of a tile, for its 16 columns, as f32 lanes."""
    if dtypes.weights == F32:
        base = b.address(tile, pair * 128)
        return b.load(base, 0, VF32, 64), b.load(base, 64, VF32, 64)
    if dtypes.weights == I8:
        halves = (b.load(tile, pair * 32 + offset, vector(I8), 16) for offset in (0, 16))
        even, odd = (b.convert("arith.sitofp", b.convert("arith.extsi", half, VI32), VF32) for half in halves)
        return even, odd
    both = b.load(tile, pair * 64, VI32, 64)
    return (both << 16).bitcast(F32), (both & -65536).bitcast(F32)


def load_quad(b: Builder, dtypes: Dtypes, tile: Value, pair: Value) -> tuple[Value, Value]:
    """Load two pairs of a tile for `vdpbf16ps`: i32 lanes of (k, k + 2) and of (k + 1, k + 3), the first one's bf16 in
    the upper half."""
    if dtypes.weights in (BF16, PAIRED):
        first, second = (b.load(tile, (pair + i) * 64, VI32, 64) for i in range(2))
        if dtypes.weights == PAIRED:
            return first, second
        return first << 16 | second & 0xFFFF, first & -65536 | second >> 16
    pairs = [load_pair(b, dtypes, tile, pair + i) for i in range(2)]  # of int8, whose f32 are bf16 with zeros
    even, odd = (first.bitcast(I32) | second.bitcast(I32) >> 16 for first, second in zip(*pairs, strict=True))
    return even, odd


def packed_offset(dtypes: Dtypes, columns: int, row: Value, column: Value) -> Value:
    """Return the byte offset of x[row, column] in packed activations of `columns` columns."""
    panel = row // TILE_ROWS * (round_up(columns, BLOCK) // BLOCK) + column // BLOCK
    return ((panel * TILE_ROWS + row % TILE_ROWS) * BLOCK + column % BLOCK) * dtypes.activation_bytes


def store_activation(b: Builder, dtypes: Dtypes, value: Value, base: Value, offset: Value) -> None:
    """Store f32 lanes as activations: rounded, and in their storage dtype."""
    store_rounded(b, dtypes, round_activation(b, dtypes, value), base, offset)


def store_rounded(b: Builder, dtypes: Dtypes, value: Value, base: Value, offset: Value) -> None:
    """Store f32 lanes that are rounded already, in the storage dtype of activations."""
    if dtypes.activations == F32:
        b.store(value, base, offset, 4)
        return
    bits = upper_half(b, value)
    if dtypes.activations == PAIRED:
        bits = b.permute(bits, _in_fours(PAIRED_ORDER, lanes_of(bits.type)))
    b.store(bits, base, offset, 4)


def _in_fours(order: Sequence[int], lanes: int) -> list[int]:
    """Return the order of `lanes` lanes in which each four have the order `order`."""
    return [first + i for first in range(0, lanes, 4) for i in order]


def load_activation(b: Builder, dtypes: Dtypes, base: Value, offset: Value, lanes: int = LANES) -> Value:
    """Load activations as f32 lanes, or a single one as a scalar."""
    if dtypes.activations == F32:
        return b.load(base, offset, vector(F32, lanes) if lanes > 1 else F32, 4)
    if lanes == 1 and dtypes.activations == PAIRED:
        offset = offset // 8 * 8 + (offset % 8 + 1) % 5 * 2
    bits = b.load(base, offset, vector(I16, lanes) if lanes > 1 else I16, 2)
    if lanes > 1 and dtypes.activations == PAIRED:
        bits = b.permute(bits, _in_fours([PAIRED_ORDER.index(i) for i in range(4)], lanes))
    return (b.convert("arith.extui", bits, with_element(bits.type, I32)) << 16).bitcast(F32)


def round_activation(b: Builder, dtypes: Dtypes, value: Value) -> Value:
    """Round f32 lanes as activations are rounded."""
    return round_bf16(b, value).bitcast(F32) if dtypes.rounding == BF16 else value


def load_packed_pair(b: Builder, dtypes: Dtypes, matrix: Value, offset: Value, pair: Value) -> tuple[Value, Value]:
    """Load the even and odd k of one pair of one column as f32; `offset` leads to the column's tile and lane."""
    if dtypes.weights == F32:
        base = b.address(matrix, offset + pair * 128)
        return b.load(base, 0, F32), b.load(base, 64, F32)
    if dtypes.weights == PAIRED:
        four = b.address(matrix, offset + pair // 2 * 128)
        half = b.convert("arith.trunci", pair % 2 * 16, I32)
        even, odd = ((b.load(four, 64 * i, I32) << half) & -65536 for i in range(2))
        return even.bitcast(F32), odd.bitcast(F32)
    both = b.load(matrix, offset + pair * 64, I32)
    return (both << 16).bitcast(F32), (both & -65536).bitcast(F32)
