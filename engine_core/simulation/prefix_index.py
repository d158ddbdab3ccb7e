"""A router's guess at the contents of an engine's prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


def prefix_keys(blocks: Sequence[int], block_tokens: int, prompt_tokens: int) -> list[int]:
    """Return a key for each prefix of a prompt that ends with a full block, the shortest first."""
    keys, key = [], block_tokens
    for block in blocks[: prompt_tokens // block_tokens]:
        key = hash((key, abs(block), block < 0))  # -1 and -2 have the same hash
        keys.append(key)
    return keys


class PrefixIndex:
    """The prefixes that were sent to an engine, as many blocks as its cache may hold; the least recent are forgotten.

    An approximation: the engine forgets in another order when it also keeps answers, or runs many at a time.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the prefixes are present, from the shortest on."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def add(self, keys: Sequence[int]) -> None:
        """Add the prefixes of one prompt. A prefix is forgotten after its extensions."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)
