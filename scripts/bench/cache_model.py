"""The prefix cache compared with a dictionary of all prefixes, which models its content."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from quire.kernels._native import PagePool, RadixTree

SALTS = ["", "a", "b"]

Key = tuple[str, tuple[int, ...]]
"""A page: its salt, and all tokens up to its end."""


class CheckedCache:
    """A tree, the sequences that use it, and a model of its content. Each operation fails where the two differ.

    The model costs as much as the tokens that an operation touches, which allows for millions of operations.
    """

    def __init__(self, num_pages: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool, block_size)
        self.pages: dict[Key, int] = {}
        self.unused: dict[Key, None] = {}  # in order of last use, least recent first
        self.sequences: list[tuple[str, int, list[int], list[int]]] = []  # salt, root, tokens, pages
        self._users: Counter[Key] = Counter()  # sequences that have the page
        self._children: Counter[Key] = Counter()  # pages right below

    def keys(self, salt: str, tokens: list[int]) -> Iterator[Key]:
        """Yield the keys of the full pages of `tokens`."""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            yield salt, tuple(tokens[:end])

    def _parent(self, key: Key) -> Key:
        return key[0], key[1][: -self.block_size]

    def add(self, salt: str, tokens: list[int]) -> bool:
        """Add a sequence that matches its prefix, computes the rest and shares it; False if there are too few pages."""
        root = self.tree.enter(salt)
        found = self.tree.match(root, tokens)
        keys = list(self.keys(salt, tokens))
        known = [self.pages[key] for key in keys if key in self.pages]
        assert found == known == [self.pages[key] for key in keys[: len(found)]]
        for key, page in zip(keys, found, strict=False):
            self.tree.retain(page)
            self._users[key] += 1
            self.unused.pop(key, None)
        missing = len(keys) - len(found)
        self.evict(max(0, missing - self.pool.free_pages))
        own = self.pool.allocate(missing, found)
        if own is None:
            self._leave(salt, root, tokens, found)
            return False
        pages = [*found, *own]
        for i in range(len(found), len(keys)):
            parent = pages[i - 1] if i else root
            assert self.tree.insert(parent, keys[i][1][-self.block_size :], pages[i]) == pages[i]
            self.pages[keys[i]] = pages[i]
            self._users[keys[i]] += 1
            self._children[self._parent(keys[i])] += 1
        self.sequences.append((salt, root, tokens, pages))
        return True

    def remove(self, index: int) -> None:
        """End the sequence at this index; its pages stay in the tree."""
        self._leave(*self.sequences.pop(index))

    def _leave(self, salt: str, root: int, tokens: list[int], pages: list[int]) -> None:
        keys = list(self.keys(salt, tokens))[: len(pages)]
        for key, page in reversed([*zip(keys, pages, strict=True)]):
            self.tree.release(page)
            self._users[key] -= 1
            if self._users[key] == 0:
                del self._users[key]
                self.unused[key] = None
        self.tree.leave(root)

    def evict(self, count: int) -> None:
        """Evict the least recently used pages, each of which is a leaf by then."""
        assert self.tree.evict(count) == min(count, len(self.unused))
        for _ in range(min(count, len(self.unused))):
            key = next(iter(self.unused))
            assert key not in self._children
            del self.unused[key], self.pages[key]
            parent = self._parent(key)
            self._children[parent] -= 1
            if self._children[parent] == 0:
                del self._children[parent]

    def check(self) -> None:
        """Check that the counts of both are equal."""
        assert self.tree.size == len(self.pages)
        assert self.tree.cached_pages == len(self.unused)
        assert self.pool.held_pages == len(self.pages)
        assert self.pool.free_pages == self.pool.total - len(self.pages)


def check_random_operations(count: int, seed: int, num_pages: int = 300, block_size: int = 4) -> None:
    """Run `count` operations: sequences with shared prefixes come and go, under several salts; pages are evicted.

    Raises AssertionError where the tree differs from the dictionary.
    """
    choose = random.Random(seed)
    cache = CheckedCache(num_pages, block_size)
    for _ in range(count):
        what = choose.random()
        if what < 0.1:
            cache.evict(choose.randrange(4))
        elif what < 0.5 and cache.sequences:
            cache.remove(choose.randrange(len(cache.sequences)))
        else:
            salt = choose.choice(SALTS)
            base: list[int] = []
            if cache.sequences and choose.random() < 0.7:
                salt, _, base, _ = choose.choice(cache.sequences)
                if choose.random() < 0.1:
                    salt = choose.choice(SALTS)
            tokens = base[: choose.randrange(len(base) + 1)] + choose.choices(range(5), k=choose.randrange(30))
            if not cache.add(salt, tokens):  # all pages are in use
                cache.remove(choose.randrange(len(cache.sequences)))
        cache.check()
    while cache.sequences:
        cache.remove(choose.randrange(len(cache.sequences)))
    cache.evict(num_pages)
    cache.check()
    assert cache.pool.free_pages == num_pages
