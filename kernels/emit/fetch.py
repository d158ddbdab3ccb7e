"""The copy of a step's inputs to memory of the device, for kernels that would each read them over a bus."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.builder import I64, Builder
from quire.kernels.emit.context import EmitContext, Kernel

FETCH_PARTS = 8
"""Work items of an array."""


@dataclass(frozen=True)
class FetchKernel(Kernel):
    """Copies arrays, by the dim and the bytes of their rows, in whole words of 8 bytes, for which they have room.

    Buffers: the arrays, then their copies. Work items: FETCH_PARTS of each array.
    """

    arrays: tuple[tuple[str, int], ...]

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        count = len(self.arrays)
        with b.items() as item:
            number, part = item % count, item // count
            words = b.index(0)
            for i, (dim, row_bytes) in enumerate(self.arrays):
                words = b.select(b.compare("eq", number, i), (b.dim(dim) * row_bytes + 7) // 8, words)
            source, target = b.buffer(number), b.buffer(number + count)
            size = (words + (FETCH_PARTS - 1)) // FETCH_PARTS
            with b.each_scalar(part * size, ((part + 1) * size).min(words)) as word:
                at = word.index * 8
                b.store(b.load(source, at, I64), target, at)
