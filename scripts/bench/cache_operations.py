"""Timing of each operation of the prefix cache."""

from __future__ import annotations

import random
import time
from bisect import bisect_left

from bench.cache_shapes import SHAPES, VOCAB_SIZE

from quire.kernels.runner import Sequences

ROOM = 512  # pages beyond the tree's, for running sequences


class FullCache:
    """A prefix cache of `nodes` pages, filled by ended sequences of one shape."""

    def __init__(self, shape: str, nodes: int, block_size: int, seed: int) -> None:
        self.nodes = nodes
        self.block_size = block_size
        self.shape = SHAPES[shape](block_size, seed)
        self.sequences = Sequences(nodes + ROOM, block_size, VOCAB_SIZE)
        self.seconds: dict[str, list[float]] = {}  # a touched token, for each call; by operation
        self._choose = random.Random(seed)
        while self.sequences.tree.size < nodes:
            slot, tokens = self._open(self.shape.extend())
            self.sequences.start(slot, tokens)
            self.sequences.share(slot, tokens)
            self.sequences.close(slot)

    def measure(self, count: int) -> None:
        """Time `count` of each operation, as sequences arrive and the oldest pages are evicted."""
        for _ in range(count):
            self._look_up()
            self._add()

    def _open(self, end: int) -> tuple[int, int]:
        """Open the sequence that ends there, with one more token, which is never cached; return its slot and tokens."""
        tokens = self.shape.tokens(end)
        return self.sequences.open([*tokens, 0], len(tokens) + 1, cache_salt=""), len(tokens)

    def _look_up(self) -> None:
        """Match one of the sequences in the tree, anywhere in it."""
        ends = self.shape.ends
        first = bisect_left(ends, len(self.shape.parents) - self.nodes)
        slot, _ = self._open(ends[self._choose.randrange(first, len(ends))])
        began = time.perf_counter()
        found, _, _ = self.sequences.match(slot)
        self._note("match", began, max(found, self.block_size))
        self.sequences.close(slot)

    def _add(self) -> None:
        """Add the next sequence: it matches its prefix, computes the rest, shares it and ends."""
        sequences = self.sequences
        slot, tokens = self._open(self.shape.extend())
        missing = (tokens - sequences.match(slot)[0]) // self.block_size
        began = time.perf_counter()
        sequences.tree.evict(missing)
        self._note("evict", began, missing * self.block_size)
        began = time.perf_counter()
        sequences.start(slot, tokens)
        sequences.share(slot, tokens)
        self._note("insert", began, tokens)
        began = time.perf_counter()
        sequences.close(slot)
        self._note("release", began, tokens)

    def _note(self, operation: str, began: float, tokens: int) -> None:
        self.seconds.setdefault(operation, []).append((time.perf_counter() - began) / tokens)
