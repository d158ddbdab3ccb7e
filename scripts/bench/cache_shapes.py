"""Sequences of a prefix cache: each shares a prefix with an earlier one, and adds some pages."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import numpy as np

VOCAB_SIZE = 32_000


class Shape(ABC):
    """A tree that grows at its branches. The number of a page determines its tokens."""

    def __init__(self, block_size: int, seed: int) -> None:
        self.parents: list[int] = []  # of each page ever made, -1 for a first page
        self.ends: list[int] = []  # the last page of each sequence
        self._block_size = block_size
        self._first = seed % 1024 << 22  # so that up to 1024 shapes share no page
        self._choose = random.Random(seed)

    @abstractmethod
    def extend(self) -> int:
        """Add a sequence; return its last page."""

    def pages(self, end: int) -> list[int]:
        """Return the path to a page, including the page."""
        path = []
        while end >= 0:
            path.append(end)
            end = self.parents[end]
        return path[::-1]

    def tokens(self, end: int) -> list[int]:
        """Return the tokens on the path to a page."""
        first = np.array(self.pages(end)) * self._block_size + self._first
        positions = first[:, None] + np.arange(self._block_size)
        tokens: list[int] = (positions * 2_654_435_761 % 2**32 // 256 % VOCAB_SIZE).ravel().tolist()
        return tokens

    def _grow(self, parent: int, count: int) -> int:
        for _ in range(count):
            self.parents.append(parent)
            parent = len(self.parents) - 1
        return parent


class TreeSearch(Shape):
    """Consecutive searches: a problem, then thoughts, each followed by 3 to 8 more, the newest first."""

    PROBLEM_PAGES = 16
    SEARCH_PAGES = 500
    NEWEST = 8  # thoughts, one of which the next one follows

    def __init__(self, block_size: int, seed: int) -> None:
        super().__init__(block_size, seed)
        self._open: list[list[int]] = []  # last page of a thought, and the number of thoughts to follow it
        self._search_end = 0

    def extend(self) -> int:
        """Add a thought."""
        if len(self.parents) >= self._search_end:
            self._search_end = len(self.parents) + self.SEARCH_PAGES
            self._open = [[self._grow(-1, self.PROBLEM_PAGES), self._choose.randint(3, 8)]]
        thought = self._choose.choice(self._open[-self.NEWEST :])
        thought[1] -= 1
        if thought[1] == 0:
            self._open.remove(thought)
        end = self._grow(thought[0], self._choose.randint(4, 8))
        self._open.append([end, self._choose.randint(3, 8)])
        self.ends.append(end)
        return end


class Conversations(Shape):
    """Conversations of several turns, some at a time, each below one of a few system prompts."""

    SYSTEM_PROMPTS = 4
    SYSTEM_PAGES = 32
    CONVERSATIONS = 16

    def __init__(self, block_size: int, seed: int) -> None:
        super().__init__(block_size, seed)
        self._systems = [self._grow(-1, self.SYSTEM_PAGES) for _ in range(self.SYSTEM_PROMPTS)]
        self._open = [self._begin() for _ in range(self.CONVERSATIONS)]

    def _begin(self) -> list[int]:
        return [self._choose.choice(self._systems), self._choose.randint(3, 8)]

    def extend(self) -> int:
        """Add a turn: a question and its answer."""
        index = self._choose.randrange(self.CONVERSATIONS)
        end, turns = self._open[index]
        end = self._grow(end, self._choose.randint(4, 12))
        self._open[index] = [end, turns - 1] if turns > 1 else self._begin()
        self.ends.append(end)
        return end


SHAPES: dict[str, type[Shape]] = {"tree search": TreeSearch, "chat": Conversations}
