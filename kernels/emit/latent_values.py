"""Values of latent attention: latents are stored once, packed as keys, and multiplied packed as values too (kv.py).

A block of 32 tokens by 32 elements has tiles of 16 tokens as keys, and tiles of 16 elements as values.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kernels.emit.builder import BF16, I16, LANES, Builder, Value, vector
from quire.kernels.emit.layout import BLOCK, ELEMENT_BYTES, TILE_ROWS, Dtypes


def store_values(b: Builder, dtypes: Dtypes, keys: Value, values: Value) -> None:
    """Store the block of K at `keys` as a block of V at `values`."""
    if dtypes.weights == BF16:
        _store_pairs(b, dtypes, keys, values)
        return
    row_bytes = TILE_ROWS * ELEMENT_BYTES[dtypes.weights]
    element = vector(dtypes.weights)
    with b.loop(0, 2) as tokens, b.loop(0, 2) as elements:
        source = b.address(keys, tokens.index * dtypes.tile_bytes + elements.index * (LANES * row_bytes))
        target = b.address(values, elements.index * dtypes.tile_bytes + tokens.index * (LANES * row_bytes))
        rows = [b.load(source, i * row_bytes, element, row_bytes) for i in range(LANES)]
        for i, row in enumerate(_transposed(b, rows)):
            b.store(row, target, i * row_bytes, row_bytes)


def _store_pairs(b: Builder, dtypes: Dtypes, keys: Value, values: Value) -> None:
    """Store a block of bf16: as K its lines are pairs of elements of 16 tokens, as V pairs of tokens of 16 elements."""
    line = TILE_ROWS * 4
    with b.loop(0, 2) as tile:
        source = b.address(keys, tile.index * dtypes.tile_bytes)
        tokens = _transposed(b, [b.load(source, i * line, vector("i32"), line) for i in range(LANES)])
        target = b.address(values, tile.index * (LANES // 2 * line))
        for pair in range(LANES // 2):
            even, odd = (b.lanes_as(tokens[2 * pair + i], I16) for i in range(2))  # each of 32 elements
            for half in range(2):
                order = [half * LANES + i // 2 + i % 2 * BLOCK for i in range(BLOCK)]
                b.store(b.shuffle(even, odd, order), target, half * dtypes.tile_bytes + pair * line, line)


def _transposed(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """Return the columns of 16 rows of 16 lanes: at each step, squares of twice the size exchange two quarters."""
    result, step = list(rows), 1
    while step < LANES:
        for i in (i for i in range(LANES) if not i & step):
            low, high = result[i], result[i + step]
            result[i] = b.shuffle(low, high, [j - step + LANES if j & step else j for j in range(LANES)])
            result[i + step] = b.shuffle(low, high, [j + LANES if j & step else j + step for j in range(LANES)])
        step *= 2
    return result
