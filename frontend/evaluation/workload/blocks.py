"""Blocks of prompts, and the names that they are given."""

from __future__ import annotations

import itertools

from quire.frontend.evaluation.workload.request import BLOCK_TOKENS

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold so many tokens of a prompt."""
    return -(-tokens // block_tokens)


def mix(value: int) -> int:
    """A step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): 64 bits out of 64, all of which depend on all."""
    value = (value + _GOLDEN) & _BITS
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _BITS
    return value ^ value >> 31


def joined(blocks: tuple[int, ...]) -> int:
    """The name of several blocks in a row, from 0 to 2**63 - 1: equal for equal ones."""
    name = len(blocks)
    for block in blocks:
        name = mix(name ^ mix(block & _BITS))
    return name >> 1


class FreshBlocks:
    """Names blocks that nobody shares: `first`, and from there on by `step`."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self._names = itertools.count(first, step)

    def take(self, count: int) -> tuple[int, ...]:
        """So many names that were never taken."""
        return tuple(itertools.islice(self._names, count))
