"""Addresses and scales of the operands of quantized products (layout.py)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels import _native
from quire.kernels.emit.builder import F16, I16, VF32, VI32, Builder, Value, vector
from quire.kernels.emit.layout import TILE_ROWS, QuantizedFormat

LINE = _native.CACHE_LINE


@dataclass(frozen=True)
class QuantizedOperands:
    """Quantized activations and columns of `k` elements."""

    format: QuantizedFormat
    k: int

    def panel(self, b: Builder, x: Value, row: Value) -> Value:
        """Return the address of the panel of x that starts with `row`."""
        return b.address(x, row // TILE_ROWS * self.format.panel_bytes(self.k))

    def panel_scales(self, b: Builder, panel: Value, group: Value) -> Value:
        """Return the address of a group's scales of the 16 rows of a panel; their sums follow."""
        return b.address(panel, group * (2 * TILE_ROWS * 4) + TILE_ROWS * self.format.depth(self.k))

    def header(self, b: Builder, block: Value, group: Value) -> Value:
        """Return the address of a group's header in a block of columns; its lines follow."""
        return b.address(block, group * self.format.group_bytes(self.k))

    def scales(self, b: Builder, header: Value) -> list[Value]:
        """Load the scales of a group's two tiles."""
        if not self.format.group:
            return [b.load(header, LINE * tile, VF32, LINE) for tile in range(2)]
        halves = [b.load(header, LINE // 2 * tile, vector(F16), LINE // 2) for tile in range(2)]
        return [b.convert("arith.extf", half, VF32) for half in halves]

    def zeros(self, b: Builder, header: Value) -> list[Value]:
        """Load the zero points of a group's two tiles."""
        at = self.format.header_bytes - LINE
        halves = [b.load(header, at + LINE // 2 * tile, vector(I16), LINE // 2) for tile in range(2)]
        return [b.convert("arith.extsi", half, VI32) for half in halves]
