"""The prefix cache as a tree of runs, against one made of the prompts that it holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from quire.kernels._native import Sequences

BLOCK_SIZE = 2
Prompt = tuple[int, ...]
NativeRun = tuple[int, int, bool, int, int, list[int], int, int, bool, list[int], list[int]]


@dataclass
class Run:
    """A run as the tests compare it: without its id, and with the pages that lead to it in place of its parent."""

    before: Prompt
    tokens: Prompt
    hits: int
    branches: int
    pages_below: int


class Cache:
    """Sequences that start and end at once, and all that is to be in the cache after them."""

    def __init__(self, num_pages: int = 2000) -> None:
        self.sequences = Sequences(num_pages, BLOCK_SIZE, 100)
        self.hits: Counter[Prompt] = Counter()
        self.pages: set[Prompt] = set()

    def visit(self, tokens: list[int], salt: str = "") -> None:
        slot = self.open(tokens, salt)
        found = self.sequences.start(slot, len(tokens))
        assert found is not None
        if not salt:
            ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
            self.hits.update(tuple(tokens[:end]) for end in ends if end <= found)
            self.pages.update(tuple(tokens[:end]) for end in ends)
        self.sequences.share(slot, len(tokens))
        self.sequences.close(slot)

    def open(self, tokens: list[int], salt: str = "") -> int:
        return self.sequences.open(tokens, len(tokens), cache_salt=salt)

    def outline(self, pinned: Sequence[int] = ()) -> list[NativeRun]:
        """Return the outline without limits."""
        return self.sequences.outline(list(pinned), max_runs=10_000, levels=100, branches=10_000)

    def children(self, page: Prompt) -> list[Prompt]:
        return [child for child in self.pages if len(child) == len(page) + BLOCK_SIZE and child[: len(page)] == page]

    def expected(self, before: Prompt = ()) -> list[Run]:
        """Return all runs after a prefix."""
        runs = []
        for start in self.children(before):
            end = start
            while len(following := self.children(end)) == 1:
                [end] = following
            below = sum(page[: len(end)] == end for page in self.pages) - 1
            runs.append(Run(before, end[len(before) :], self.hits[start], len(following), below))
            runs += self.expected(end)
        return runs

    def outlined(self) -> list[Run]:
        """Return all runs as the outline has them."""
        runs: list[Run] = []
        prompts: list[Prompt] = []
        for _, parent, is_salted, hits, _, pages, branches, below, _, first, last in self.outline():
            before = prompts[parent] if parent >= 0 else ()
            size = sum(pages) * BLOCK_SIZE
            [whole] = [p for p in self.pages if matches(p, before, size, first, last)] if size else [()]
            prompts.append(whole)
            assert not is_salted
            if size:
                runs.append(Run(before, whole[len(before) :], hits, branches, below))
        return runs


def matches(prompt: Prompt, before: Prompt, size: int, first: list[int], last: list[int]) -> bool:
    end = list(prompt[-BLOCK_SIZE:]) if size > BLOCK_SIZE else []
    begins = prompt[: len(before)] == before and list(prompt[len(before) :][:BLOCK_SIZE]) == first
    return len(prompt) == len(before) + size and begins and end == last


@pytest.mark.parametrize("seed", range(4))
def test_an_outline_without_limits_has_every_run(seed: int) -> None:
    choose = random.Random(seed)
    cache = Cache()
    for number in range(60):  # the last page tells prompts apart, so that a run is known by its ends
        tokens = [choose.randrange(2) for _ in range(2 * choose.randrange(5))]
        cache.visit([*tokens, 9, number, *[number] * (2 * choose.randrange(3)), 7])
    for _ in range(20):
        cache.visit([*choose.choice(sorted(cache.pages)), 8])
    found, expected = cache.outlined(), cache.expected()
    key = lambda run: (run.before, run.tokens)  # noqa: E731
    assert sorted(found, key=key) == sorted(expected, key=key)
    [whole, *_] = cache.outline()
    assert whole[:2] == (-1, -1)
    assert whole[6:8] == (len(cache.children(())), len(cache.pages))


def test_branches_are_the_ones_with_the_most_hits_and_levels_are_bounded() -> None:
    cache = Cache()
    for number in range(30):
        for _ in range(1 + number % 10):
            cache.visit([1, 2, number, number, 5, 5, 9])
            cache.visit([1, 2, number, number, 6, 6, 9])
    whole, common, *branches = cache.sequences.outline([], max_runs=100, levels=2, branches=5)
    assert (whole[6], common[6], len(branches)) == (1, 30, 5)
    assert [run[3] for run in branches] == [19, 19, 19, 17, 17]
    assert all(run[6] == 2 for run in branches)  # they have branches of their own, which are not in it
    chosen = branches[3]
    more = cache.sequences.outline([], max_runs=100, levels=2, branches=5, shown={common[0]: 7, chosen[0]: 1})
    assert len(more) == 2 + 7 + 1
    assert more[more[-1][1]] == chosen
    closed = cache.sequences.outline([], max_runs=100, levels=2, branches=5, shown={common[0]: 0})
    assert [run[0] for run in closed] == [-1, common[0]]
    assert cache.sequences.outline([], max_runs=4, levels=2, branches=5) == [whole, common, *branches[:2]]


def test_states_of_pages_and_users() -> None:
    cache = Cache()
    cache.visit([1, 1, 2, 2, 3, 3, 9])
    slots = [cache.open(tokens) for tokens in ([1, 1, 2, 2, 9], [1, 1, 9], [1, 1, 9])]
    for slot in slots:
        cache.sequences.start(slot, 2)
    [_, run] = cache.outline()
    assert (run[4], run[5]) == (3, [0, 1, 1, 1, 0])
    [_, run] = cache.outline(slots[:1])
    assert run[5] == [0, 0, 0, 1, 2]
    assert run[8]  # its last page is the only one that may be evicted


def test_salts_hide_their_tokens_and_come_from_a_run_without_pages() -> None:
    cache = Cache()
    cache.visit([1, 1, 2, 2, 9])
    for salt in ("mine", "mine", "mine", "yours"):
        cache.visit([3, 3, 4, 4, 9], salt)
    whole, mine, yours, plain, *pages = cache.outline()
    assert whole[6] == 3
    assert [mine[2:4], yours[2:4], plain[2:4]] == [(True, 2), (True, 0), (False, 0)]
    assert [(sum(run[5]), run[6], run[7]) for run in (mine, yours, plain)] == [(0, 1, 2), (0, 1, 2), (2, 0, 0)]
    assert [(run[1], run[2], sum(run[5]), run[9:]) for run in pages] == [(1, True, 2, ([], [])), (2, True, 2, ([], []))]


def test_the_id_of_a_page_is_another_one_after_its_eviction() -> None:
    cache = Cache(3)
    cache.visit([1, 1, 2, 2, 9])
    ids = [run[0] for run in cache.outline()]
    assert cache.sequences.tree.evict(10) == 2
    assert [run[0] for run in cache.outline()] == [-1]
    cache.visit([1, 1, 2, 2, 9])
    again = [run[0] for run in cache.outline()]
    assert again[0] == ids[0] == -1
    assert again[1] != ids[1]
    assert again[1] % 2**32 == ids[1] % 2**32


def test_limits_are_checked() -> None:
    cache = Cache()
    with pytest.raises(ValueError, match="max_runs=0"):
        cache.sequences.outline([], max_runs=0, levels=1, branches=1)
    with pytest.raises(ValueError, match="levels=-1"):
        cache.sequences.outline([], max_runs=1, levels=-1, branches=1)
    with pytest.raises(ValueError, match=r"shown\[5\]=-2"):
        cache.sequences.outline([], max_runs=1, levels=1, branches=1, shown={5: -2})
