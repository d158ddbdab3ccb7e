"""Grouping of assignments by expert by a block of threads: see GroupKernel.

Threads count the assignments of parts of all, one after the other, so that each learns its place among those of its
expert in its part. What comes before, in parts and of experts, is added up afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.builder import I32, I64, Builder, Value
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.experts import ENTRY_BYTES, GroupKernel
from quire.kernels.emit.layout import TILE_ROWS

COUNTS_BYTES = 32 << 10
"""Shared memory for the counts of all parts."""

_MOST_PARTS = 256


@dataclass(frozen=True)
class BlockGroupKernel(GroupKernel):
    """The kernel with a thread for each part of the assignments, then one for each expert, then for each assignment."""

    @property
    def _parts(self) -> int:
        """Parts of the assignments, as many as there is memory for counts of; an even number."""
        return max(min(COUNTS_BYTES // (4 * self.experts) - 1, _MOST_PARTS) // 2 * 2, 2)

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        numbers, slots, entries = (b.buffer(i) for i in range(3))
        assignments = b.dim("tokens") * self.top_k
        size = (assignments + (self._parts - 1)) // self._parts
        counts = b.scratch(self.experts * self._row_bytes)  # i32 [expert][part], then the total
        firsts = b.scratch(self.experts * 16)  # i64 [expert][grouped row, entry]
        with b.items():
            with b.each_scalar(0, self.experts * (self._parts + 1)) as place:
                b.store(b.constant(0, I32), counts, place.index * 4)
            with b.each_scalar(0, self._parts) as part:
                first = part.index * size
                with b.loop(first, (first + size).min(assignments)) as assignment:
                    at = b.load_index(numbers, assignment.index) * self._row_bytes + part.index * 4
                    count = b.load(counts, at, I32)
                    b.store(count, slots, assignment.index * 4)
                    b.store(count + 1, counts, at)
            with b.each_scalar(0, self.experts) as expert:
                row = b.address(counts, expert.index * self._row_bytes)
                with b.loop(0, self._parts, state=[b.constant(0, I32)]) as part:
                    count = b.load(row, part.index * 4, I32)
                    b.store(part.state[0], row, part.index * 4)
                    part.carry(part.state[0] + count)
                b.store(part.results[0], row, self._parts * 4)
            self._start_experts(b, context, counts, firsts, entries)
            with b.each_scalar(0, self.experts) as expert:
                self._write_entries(b, context, expert.index, self._count(b, counts, expert.index), firsts, entries)
            with b.each_scalar(0, assignments) as assignment:
                expert_number = b.load_index(numbers, assignment.index)
                before = b.load(counts, expert_number * self._row_bytes + assignment.index // size * 4, I32)
                row = b.convert("arith.trunci", b.load(firsts, expert_number * 16, I64), I32)
                slot = b.load(slots, assignment.index * 4, I32) + before + row
                b.store(slot, slots, assignment.index * 4)

    @property
    def _row_bytes(self) -> int:
        """Bytes of an expert's counts and their total: an odd number of banks."""
        return (self._parts + 1) * 4

    def _count(self, b: Builder, counts: Value, expert: Value) -> Value:
        """Load the number of assignments of an expert."""
        return b.convert("arith.extui", b.load(counts, expert * self._row_bytes + self._parts * 4, I32), I64)

    def _start_experts(self, b: Builder, context: EmitContext, counts: Value, firsts: Value, entries: Value) -> None:
        """Store the first grouped row and the first entry of each expert, and the number of entries."""
        size, zero = context.rows_per_item, b.index(0)
        with b.once():
            with b.loop(0, self.experts, state=[zero, zero]) as expert:
                row, entry = expert.state
                count = self._count(b, counts, expert.index)
                b.store(row, firsts, expert.index * 16)
                b.store(entry, firsts, expert.index * 16 + 8)
                expert.carry(
                    row + (count + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS, entry + (count + (size - 1)) // size
                )
            b.store(expert.results[1], entries, 0)

    @staticmethod
    def _write_entries(
        b: Builder, context: EmitContext, expert: Value, count: Value, firsts: Value, entries: Value
    ) -> None:
        """Write the entries of an expert."""
        size = context.rows_per_item
        row, first = (b.load(firsts, expert * 16 + 8 * i, I64) for i in range(2))
        with b.loop(0, count, size) as start:
            entry = b.address(entries, (first + start.index // size) * ENTRY_BYTES + 8)
            for i, field in enumerate((expert, row + start.index, (count - start.index).min(size))):
                b.store(field, entry, 8 * i)
