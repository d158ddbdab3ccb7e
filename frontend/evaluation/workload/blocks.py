"""Blocks of prompts: their names, and the tokens that stand for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of blocks that hold a prompt of `tokens` tokens."""
    return -(-tokens // block_tokens)


def joined(blocks: tuple[int, ...]) -> int:
    """Return one name, 0 to 2**63 - 1, for several consecutive blocks; equal blocks have equal names."""
    name = len(blocks)
    for block in blocks:
        name = _mix(name ^ _mix(block & _BITS))
    return name >> 1


class FreshBlocks:
    """Source of names for blocks that no other prompt shares: `first`, and from there on by `step`."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self._names = itertools.count(first, step)

    def take(self, count: int) -> tuple[int, ...]:
        """Return `count` names that were never taken before."""
        return tuple(itertools.islice(self._names, count))


class Prompts:
    """Pseudo-random token ids of prompts, determined by `seed`, each block's name and the position in the block.

    So a block has the same tokens in every prompt, and other blocks have other tokens. `avoid` are ids that no prompt
    has: those with a meaning, such as the end token. Raises ValueError if they leave no token.
    """

    def __init__(self, vocab_size: int, seed: int = 0, *, avoid: Iterable[int] = ()) -> None:
        avoided = set(avoid)
        allowed = [token for token in range(vocab_size) if token not in avoided]
        if not allowed:
            raise ValueError(
                f"vocab_size={vocab_size} without the {len(avoided)} ids to avoid leaves no token; avoid fewer"
            )
        # Prompts share the int objects, so that a token of a prepared prompt takes 8 bytes and not 40.
        self._ints = np.array(allowed, dtype=object)
        self._seed = np.uint64(_mix(seed))

    def tokens(self, request: WorkloadRequest) -> list[int]:
        """Return the prompt: `prompt_tokens` ids."""
        blocks = np.array(request.blocks, dtype=np.int64).view(np.uint64)
        places = np.arange(request.block_tokens, dtype=np.uint64) * np.uint64(_GOLDEN)
        starts = _mixed(blocks ^ self._seed)
        bits = _mixed((starts[:, np.newaxis] + places).ravel()[: request.prompt_tokens])
        # The high half of a product is a fair choice, and needs no division.
        chosen = (bits >> np.uint64(32)) * np.uint64(len(self._ints)) >> np.uint64(32)
        prompt: list[int] = self._ints[chosen.astype(np.int64)].tolist()
        return prompt


def _mix(value: int) -> int:
    """Return a step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): each of 64 bits depends on all of the input."""
    value = (value + _GOLDEN) & _BITS
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _BITS
    return value ^ value >> 31


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `_mix` of each value."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
