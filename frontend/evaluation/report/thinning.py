"""Keeps some of a series, evenly, however long it grows."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Keeps the items whose index is a multiple of `every`, which doubles whenever there are more than `limit`.

    Which are kept depends on the indices alone, not on the order in which they come.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.every = 1
        self._kept: dict[int, Item] = {}

    def wants(self, index: int) -> bool:
        """Whether an item of that index would be kept; spares making those that would not."""
        return index % self.every == 0

    def add(self, index: int, item: Item) -> None:
        """Keep the item, or not."""
        if not self.wants(index):
            return
        self._kept[index] = item
        while len(self._kept) > self._limit:
            self.every *= 2
            self._kept = {index: item for index, item in self._kept.items() if self.wants(index)}

    def items(self) -> list[tuple[int, Item]]:
        """What is kept, with its indices, in their order."""
        return sorted(self._kept.items(), key=lambda pair: pair[0])
