"""Products of probabilities with latents, which are stored once, packed as keys: as values they are read where they
lie. emit/latent_values.py has both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import BF16, F32, I8, I32, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.cuda.products import COLUMNS, BlockProducts
from quire.kernels.emit.layout import TILE_ROWS


@dataclass(frozen=True)
class LatentProducts(BlockProducts):
    """Emits products with blocks of 32 tokens by 32 elements that are packed as keys; k are the tokens.

    Four elements of a thread are two lines of 16 tokens.
    """

    def _place(self, quad: Value) -> Value:
        """See BlockProducts: the first of the lines of a thread's elements."""
        return quad * (COLUMNS // 2 * self._line_bytes)

    @property
    def _line_bytes(self) -> int:
        """Bytes of two elements of 16 tokens."""
        return TILE_ROWS * {BF16: 4, F32: 8, I8: 2}[self.dtypes.weights]

    def _load_pair(self, b: BlockBuilder, weights: Value, pair: Value) -> tuple[Sequence[Value], Sequence[Value]]:
        """See BlockProducts: of two tokens."""
        half = TILE_ROWS // 2
        tile = b.address(weights, pair // half * self.dtypes.tile_bytes)
        first, second = (
            [column for line in range(COLUMNS // 2) for column in self._columns(b, tile, line, pair % half * 2 + token)]
            for token in range(2)
        )
        return first, second

    def _columns(self, b: BlockBuilder, tile: Value, line: int, token: Value) -> list[Value]:
        """Return two elements of a token."""
        at = b.address(tile, line * self._line_bytes)
        if self.dtypes.weights == BF16:
            word = b.load(at, token * 4, I32)
            return [(word << 16).bitcast(F32), (word & -65536).bitcast(F32)]
        if self.dtypes.weights == F32:
            return [b.load(at, token * 4 + i * 64, F32) for i in range(2)]
        return [b.convert("arith.sitofp", b.load(at, token + i * TILE_ROWS, I8), F32) for i in range(2)]
