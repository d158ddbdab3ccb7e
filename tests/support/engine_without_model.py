"""An engine without a model, whose KV memory lies in a file: the test writes the KV, so that it can tell what is right.

`python engine_without_model.py FD PAGES` computes random prefixes until it is killed.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import random
import sys
from collections.abc import Iterator

from quire.kernels._native import CpuDevice, KvLayerShape, Runner, RunnerConfig, ThreadPool

BLOCK_SIZE = 32
KV_LAYERS = ((2, 64), (3, 96))
"""Heads of each layer, and bytes of their tiles; a page is a tile."""
RUNS = [(layer, head, size) for layer, (heads, size) in enumerate(KV_LAYERS) for head in range(heads)]
PAGE_BYTES = sum(size for _, _, size in RUNS)
SALTS = ("", "tenant")
LONGEST = 3  # pages of a prefix

Prefix = tuple[str, tuple[int, ...]]
"""A salt, and the token of which each page is full."""

PREFIXES: list[Prefix] = [
    (salt, blocks)
    for salt in SALTS
    for length in range(1, LONGEST + 1)
    for blocks in itertools.product((1, 2, 3), repeat=length)
]


def content(prefix: Prefix) -> bytes:
    """Return the bytes of all tiles of a prefix's last page."""
    return hashlib.shake_128(repr(prefix).encode()).digest(PAGE_BYTES)


def tokens_of(blocks: tuple[int, ...]) -> list[int]:
    return [block for block in blocks for _ in range(BLOCK_SIZE)]


def memfd() -> int:
    return os.memfd_create("kv", os.MFD_CLOEXEC)


class Engine:
    """A runner without a model: the test writes the KV."""

    def __init__(self, fd: int, num_pages: int, model: str = "model", *, sealed_queues: int = 0) -> None:
        self.fd, self.num_pages = fd, num_pages
        self.native = Runner(
            RunnerConfig(
                num_pages=num_pages, block_size=BLOCK_SIZE, vocab_size=8,
                max_num_batched_tokens=256, max_logit_rows=1, logit_stride=32, hidden_size=32, tokens_per_entry=4,
                kv_layers=[
                    KvLayerShape(heads=heads, tile_bytes=size, value_offset=size // 2) for heads, size in KV_LAYERS
                ],
                kv_memory_fd=fd, kv_model=model, sealed_queues=sealed_queues,
            ),
            CpuDevice(ThreadPool(2)),
        )  # fmt: skip
        self.native.open_kv()
        self.sequences = self.native.sequences
        self.tree = self.sequences.tree
        self.slots: list[int] = []

    def tiles(self, page: int) -> Iterator[tuple[int, int]]:
        """Yield the address and the size of each tile of a page."""
        for layer, head, size in RUNS:
            yield self.native.kv_layer(layer) + (head * self.num_pages + page) * size, size

    def write(self, page: int, data: bytes) -> None:
        for address, size in self.tiles(page):
            ctypes.memmove(address, data[:size], size)
            data = data[size:]

    def read(self, page: int) -> bytes:
        return b"".join(ctypes.string_at(address, size) for address, size in self.tiles(page))

    def open(self, salt: str, blocks: tuple[int, ...]) -> tuple[int, int] | None:
        """Open a sequence, write the KV of its pages, and return its slot and cached tokens, or None without pages."""
        tokens = [*tokens_of(blocks), 0]
        slot = self.sequences.open(tokens, len(tokens), cache_salt=salt)
        cached = self.sequences.start(slot, len(tokens))
        if cached is None:
            self.sequences.close(slot)
            return None
        pages = self.sequences.pages(slot)
        for i in range(cached // BLOCK_SIZE, len(blocks)):
            self.write(pages[i], content((salt, blocks[: i + 1])))
        return slot, cached

    def compute(self, salt: str, blocks: tuple[int, ...]) -> int | None:
        """Open a sequence and take a step, after which its full pages are in the cache."""
        opened = self.open(salt, blocks)
        if opened is None:
            return None
        slot, cached = opened
        self.native.step([slot], [cached], [len(blocks) * BLOCK_SIZE + 1 - cached])
        self.slots.append(slot)
        return slot

    def pages(self) -> dict[Prefix, int]:
        """Return the last page of every cached prefix."""
        found = {}
        for salt, blocks in PREFIXES:
            root = self.tree.enter(salt)
            pages = self.tree.match(root, tokens_of(blocks))
            self.tree.leave(root)
            if len(pages) == len(blocks):
                found[salt, blocks] = pages[-1]
        return found

    def crash(self) -> Engine:
        """Return an engine that begins with the memory as it is now."""
        return Engine(self.copy(), self.num_pages)

    def copy(self) -> int:
        copy, size = memfd(), os.fstat(self.fd).st_size
        assert os.pwrite(copy, os.pread(self.fd, size, 0), 0) == size
        return copy

    def check(self) -> None:
        """Check that every page of the cache holds what was computed for its prefix, and that no page is lost."""
        pages = self.pages()
        assert self.tree.size == len(set(pages.values())) == len(pages)
        for prefix, page in pages.items():
            assert self.read(page) == content(prefix)
        sequences = self.sequences
        assert sequences.free_pages + sequences.cached_pages + sequences.held_pages == self.num_pages

    def end(self) -> None:
        os.close(self.fd)


def churn(fd: int, num_pages: int) -> None:
    """Compute random prefixes until killed."""
    engine, choose = Engine(fd, num_pages), random.Random()
    print("begun", flush=True)
    while True:
        for _ in range(20):
            engine.compute(choose.choice(SALTS), tuple(choose.choices((1, 2, 3), k=choose.randrange(1, LONGEST + 1))))
            if len(engine.slots) > 3:
                engine.sequences.close(engine.slots.pop(choose.randrange(4)))
        print(flush=True)


if __name__ == "__main__":
    churn(int(sys.argv[1]), int(sys.argv[2]))
