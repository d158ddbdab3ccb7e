"""Attention over latents of more query heads than shared memory has room for: see emit/attention.py for the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace

from quire.kernels._native import AttentionEntry, KvSplit
from quire.kernels.emit.attention import AttentionKernel, Entry, first_block, split_bytes
from quire.kernels.emit.builder import I64, PTR, Builder
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.kv import KvLayout, PagedKv


@dataclass(frozen=True)
class LatentAttentionKernel(AttentionKernel):
    """The kernel for entries of one query token, whose query heads are computed in `parts`, one after the other.

    No head depends on another, so that the bits are the same. Each part reads the KV anew.
    """

    parts: int = 1

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        products, kv_heads = context.kv_products, self.heads.kv
        layout = KvLayout(self.heads, products.dtypes)
        part = replace(self, heads=replace(self.heads, kv=kv_heads * self.parts))  # whose groups are smaller
        group, size = part.heads.group, split_bytes(self.heads)
        entries, queries, tiles, out = (b.buffer(i) for i in range(4))
        frame = part.frame(b, context)
        with b.items() as item:
            number, kv_head = item // kv_heads, item % kv_heads
            if not self.kv_split:
                number = b.dim("entries") - 1 - number
            names = KvSplit if self.kv_split else AttentionEntry
            at = b.address(entries, number * names.BYTES)
            row, position = b.load(at, names.ROW, I64), b.load(at, names.POSITION, I64)
            kv = PagedKv(layout, tiles, b.load(at, names.PAGES, PTR), kv_head, self.page_tiles)
            entry, rows = Entry(row, 1, position, kv), kv_head * b.dim("max_num_batched_tokens") + row
            block = b.load(at, KvSplit.BLOCK, I64) if self.kv_split else None
            needed = nullcontext() if block is None else b.when(block >= first_block(b, position, self.window))
            with needed, b.loop(0, self.parts) as turn:
                # What comes before the rows of a part, beside the part of it that groups of their size would have.
                skipped = rows * (self.heads.group - group) + turn.index * group
                its_queries = b.address(queries, skipped * layout.query_bytes)
                part.attend(b, products, entry, its_queries, frame, block)
                if block is None:
                    head = kv_head * self.parts + turn.index
                    frame.state.write(b, products.dtypes, row, 1, head, out)
                else:
                    first = item * self.heads.group + turn.index * group
                    part.write_split(b, frame.state, b.address(out, first * size))


def in_parts(kernel: AttentionKernel, context: EmitContext) -> Iterator[LatentAttentionKernel]:
    """Yield the kernel with its query heads in parts, the fewest first; nothing where that can't be."""
    group = kernel.heads.group
    if not kernel.heads.latent or kernel.sinks or context.capabilities.tokens_per_entry(group) > 1:
        return
    values = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    for parts in range(2, group + 1):
        if group % parts == 0:
            yield LatentAttentionKernel(**values, parts=parts)
