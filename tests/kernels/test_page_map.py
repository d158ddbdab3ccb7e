"""The map of the pool against one that is counted page by page."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.kernels._native import Sequences

BLOCK_SIZE = 2
FREE, HELD, SHARED, CACHED, PINNED = range(5)


class Pool:
    """Sequences with common prefixes that start, share pages and end; the latest may be pinned."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self.num_pages = num_pages
        self.sequences = Sequences(num_pages, BLOCK_SIZE, 10)
        self.open: list[int] = []
        self.pinned: list[int] = []
        self.choose = random.Random(seed)

    def start(self) -> None:
        tokens = [self.choose.randrange(2) for _ in range(self.choose.randrange(1, 14))]
        slot = self.sequences.open(tokens, len(tokens), cache_salt=self.choose.choice(["", "salt", None]))
        if self.sequences.start(slot, len(tokens)) is None:
            self.sequences.close(slot)
            return
        self.sequences.share(slot, len(tokens))
        self.open.append(slot)

    def end(self) -> None:
        slot = self.open.pop(self.choose.randrange(len(self.open)))
        self.sequences.close(slot)
        if slot in self.pinned:
            self.pinned.remove(slot)

    def expected(self) -> list[int]:
        """Return the state of each page; free and cached pages, which no sequence holds, are not told apart."""
        holders = Counter(page for slot in self.open for page in self.sequences.pages(slot))
        pins = {page for slot in self.pinned for page in self.sequences.pages(slot)}
        states = [CACHED if holders[page] == 0 else min(holders[page], SHARED) for page in range(self.num_pages)]
        return [PINNED if page in pins else state for page, state in enumerate(states)]

    def check(self) -> None:
        counts, per_cell, cells = self.sequences.page_map(self.pinned, self.num_pages)
        assert per_cell == 1
        assert [CACHED if state == FREE else state for state in cells] == self.expected()
        assert counts == [cells.count(state) for state in range(5)]
        assert counts[FREE] == self.sequences.free_pages
        assert counts[CACHED] == self.sequences.cached_pages
        assert counts[HELD] + counts[SHARED] + counts[PINNED] == self.sequences.held_pages


@pytest.mark.parametrize("seed", range(10))
def test_each_page_has_the_state_of_its_holders(seed: int) -> None:
    pool = Pool(40, seed)
    for _ in range(100):
        if pool.open and pool.choose.random() < 0.45:
            pool.end()
        else:
            pool.start()
            if pool.choose.random() < 0.1 and pool.open:
                pool.pinned = [pool.open[-1]]
        pool.check()


@pytest.mark.parametrize("max_cells", [1, 7, 20, 39])
def test_a_large_pool_is_downsampled(max_cells: int) -> None:
    pool = Pool(40, seed=3)
    for _ in range(8):
        pool.start()
    counts, _, states = pool.sequences.page_map([], 40)
    downsampled, per_cell, cells = pool.sequences.page_map([], max_cells)
    assert downsampled == counts
    assert len(cells) == 5 * -(-40 // per_cell) <= 5 * max_cells
    for cell in range(len(cells) // 5):
        pages = states[cell * per_cell : (cell + 1) * per_cell]
        expected = [round(255 * pages.count(state) / len(pages) + 1e-9) for state in range(5)]
        assert list(cells[5 * cell : 5 * cell + 5]) == expected


def test_a_map_needs_a_cell() -> None:
    with pytest.raises(ValueError, match="max_cells=0"):
        Sequences(4, BLOCK_SIZE, 10).page_map([], 0)
