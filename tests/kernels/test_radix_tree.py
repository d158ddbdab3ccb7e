"""The prefix cache against a dictionary of all prefixes."""

from __future__ import annotations

import pytest
from bench.cache_model import SALTS, CheckedCache, check_random_operations
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kernels._native import PagePool, RadixTree

PAGE = 2
TOKENS = st.lists(st.integers(0, 2), max_size=12)


class CacheStates(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 20))
    def start(self, num_pages: int) -> None:
        self.cache = CheckedCache(num_pages, PAGE)

    @rule(salt=st.sampled_from(SALTS), tokens=TOKENS)
    def add(self, salt: str, tokens: list[int]) -> None:
        self.cache.add(salt, tokens)

    @rule(index=st.integers(0, 10))
    def remove(self, index: int) -> None:
        if index < len(self.cache.sequences):
            self.cache.remove(index)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @invariant()
    def accounts(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        while self.cache.sequences:
            self.cache.remove(0)
        self.cache.evict(self.cache.pool.total)
        self.cache.check()
        assert self.cache.pool.free_pages == self.cache.pool.total


CacheStates.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestCacheStates = CacheStates.TestCase


def test_the_first_of_two_equal_pages_is_kept() -> None:
    pool = PagePool(4)
    tree = RadixTree(pool, PAGE)
    root = tree.enter("")
    first, second = pool.allocate(2) or []
    assert tree.insert(root, [1, 2], first) == first
    assert tree.insert(root, [1, 2], second) == first
    assert tree.insert(tree.enter("other"), [1, 2], second) == second
    assert (pool.references(first), pool.references(second)) == (2, 2)


def test_an_old_path_that_is_reused_outlives_a_newer_one() -> None:
    cache = CheckedCache(8, PAGE)
    cache.add("", [1, 1, 2, 2])
    cache.remove(0)
    cache.add("", [3, 3])
    cache.remove(0)
    cache.add("", [1, 1])
    cache.remove(0)
    cache.evict(2)
    assert set(cache.pages) == {("", (1, 1))}


@pytest.mark.parametrize("pages", [1, 31, 32, 33, 50])
def test_a_long_path_matches_up_to_its_first_difference(pages: int) -> None:
    cache = CheckedCache(60, PAGE)
    tokens = list(range(2 * pages))
    cache.add("", tokens)
    path = cache.sequences[0][3]
    root = cache.tree.enter("")
    for found in range(pages + 1):
        assert cache.tree.match(root, [*tokens[: 2 * found], 7, 7, *tokens[2 * found :]]) == path[:found]
        below = path[found - 1] if found else root
        assert cache.tree.match(below, tokens[2 * found :]) == path[found:]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]])
def test_a_page_that_is_not_full_is_rejected(tokens: list[int]) -> None:
    pool = PagePool(4)
    tree = RadixTree(pool, PAGE)
    with pytest.raises(ValueError, match=f"a page holds 2 tokens; {len(tokens)} were given"):
        tree.insert(tree.enter(""), tokens, (pool.allocate(1) or [])[0])


def test_depth_first_order() -> None:
    cache = CheckedCache(32, block_size=1)
    paths = [[1], [2, 1, 1], [1, 1, 1, 1], [], [2, 1], [1, 2, 1], [1, 1], [3, 1]]
    for path in paths:
        cache.add("", path)
    ends = [pages[-1] if pages else -1 for _, _, _, pages in cache.sequences]
    order = [paths[i] for i in cache.tree.depth_first(ends)]
    assert order == [[1, 1, 1, 1], [1, 1], [1, 2, 1], [1], [2, 1, 1], [2, 1], [3, 1], []]


def test_random_operations_against_the_dictionary() -> None:
    """Run a short version of `scripts/bench_cache.py --check`."""
    check_random_operations(5000, seed=5)
