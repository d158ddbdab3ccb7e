"""Low-rank changes of the experts that tokens are routed to: see adapters.py and experts.py."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.adapters import ENTRY_BYTES
from quire.kernels.emit.builder import I32, I64, Builder
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.shrink import ShrinkKernel


@dataclass(frozen=True)
class ExpertShrinkKernel(ShrinkKernel):
    """The short vectors of assignments whose tokens have adapters.

    The table has an adapter's entries of all experts one after the other. Work items are tiles times assignments, those
    of a tile one after the other. Buffers: x, whose rows are tokens, or grouped with `grouped`; the adapters of tokens
    (i32), the chosen experts and slots, the number in the table of each grouped row's entry, i32, which is written, 0
    for rows without an adapter; the table, and the short vectors of grouped rows.
    """

    experts: int = 0
    top_k: int = 0
    grouped: bool = False

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        x, adapters, experts, slots, entries, table, out = (b.buffer(i) for i in range(7))
        count = b.dim("tokens") * self.top_k
        with b.items() as item:
            tile, assignment = item // count, item % count
            token, slot = assignment // self.top_k, b.load_index(slots, assignment)
            adapter = b.load_index(adapters, token)
            number = adapter * self.experts + b.load_index(experts, assignment)
            number = b.select(b.compare("eq", adapter, 0), b.index(0), number)
            with b.when(b.compare("eq", tile, 0)), b.once():
                b.store(b.convert("arith.trunci", number, I32), entries, slot * 4)
            entry = b.address(table, number * ENTRY_BYTES)
            with b.when(tile < b.load(entry, 24, I64)):
                row = slot if self.grouped else token
                self._shrink(b, context.dtypes, x, [(row, b.address(out, slot * (self.tiles * 64)))], entry, tile)
