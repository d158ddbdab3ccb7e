"""Times the operations of the prefix cache, each alone."""

from __future__ import annotations

import random
import time
from bisect import bisect_left

from bench.cache_shapes import SHAPES, VOCAB_SIZE

from quire.kernels.runner import Sequences

ROOM = 512  # pages beyond the tree's, for those that run


class FullCache:
    """A prefix cache of `nodes` pages, which sequences of one shape have filled and have left."""

    def __init__(self, shape: str, nodes: int, page_size: int, seed: int) -> None:
        self.nodes = nodes
        self.page_size = page_size
        self.shape = SHAPES[shape](page_size, seed)
        self.sequences = Sequences(nodes + ROOM, page_size, VOCAB_SIZE)
        self.seconds: dict[str, list[float]] = {}  # of each time, a token that was touched; by operation
        self._choose = random.Random(seed)
        while self.sequences.tree.size < nodes:
            slot, tokens = self._open(self.shape.extend())
            self.sequences.start(slot, tokens)
            self.sequences.share(slot, tokens)
            self.sequences.close(slot)

    def measure(self, count: int) -> None:
        """Times `count` of each operation, while sequences go on to come and the oldest pages to go."""
        for _ in range(count):
            self._look_up()
            self._add()

    def _open(self, end: int) -> tuple[int, int]:
        """A slot with the sequence that ends so, and one token more, the one that is never cached; its tokens."""
        tokens = self.shape.tokens(end)
        return self.sequences.open([*tokens, 0], len(tokens) + 1, cache_salt=""), len(tokens)

    def _look_up(self) -> None:
        """Matches one of the sequences that the tree holds, anywhere in it."""
        ends = self.shape.ends
        first = bisect_left(ends, len(self.shape.parents) - self.nodes)
        slot, _ = self._open(ends[self._choose.randrange(first, len(ends))])
        began = time.perf_counter()
        found, _, _ = self.sequences.match(slot)
        self._note("match", began, max(found, self.page_size))
        self.sequences.close(slot)

    def _add(self) -> None:
        """The next sequence: finds what is there, computes the rest, shares it and ends."""
        sequences = self.sequences
        slot, tokens = self._open(self.shape.extend())
        missing = (tokens - sequences.match(slot)[0]) // self.page_size
        began = time.perf_counter()
        sequences.tree.evict(missing)
        self._note("evict", began, missing * self.page_size)
        began = time.perf_counter()
        sequences.start(slot, tokens)
        sequences.share(slot, tokens)
        self._note("insert", began, tokens)
        began = time.perf_counter()
        sequences.close(slot)
        self._note("release", began, tokens)

    def _note(self, operation: str, began: float, tokens: int) -> None:
        self.seconds.setdefault(operation, []).append((time.perf_counter() - began) / tokens)
