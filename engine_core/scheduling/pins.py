"""Pinned prefixes, which stay in the prefix cache while no request uses them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kernels.runner import Sequences

Prefix = tuple[str, tuple[int, ...]]
"""Salt and tokens."""


class Pins:
    """Each pinned prefix has a slot of its own, which holds its pages and never runs."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._slots: dict[Prefix, int] = {}

    @property
    def slots(self) -> list[int]:
        """Slots of the pinned prefixes."""
        return list(self._slots.values())

    def pin(self, token_ids: Sequence[int], cache_salt: str) -> int:
        """Pin the pages that the cache holds of a prefix; return how many of its tokens these hold.

        Raises ValueError for tokens that the model does not have.
        """
        prefix = cache_salt, tuple(token_ids)
        self.unpin(*prefix)
        # One token more, as a match leaves one to compute.
        slot = self._sequences.open([*token_ids, token_ids[-1]], len(token_ids), cache_salt=cache_salt)
        found = self._sequences.match(slot)[0]
        if found == 0:
            self._sequences.close(slot)
            return 0
        self._sequences.start(slot, found)
        self._slots[prefix] = slot
        return found

    def unpin(self, cache_salt: str, token_ids: Sequence[int]) -> bool:
        """Let a prefix be evicted again; return True if it was pinned."""
        slot = self._slots.pop((cache_salt, tuple(token_ids)), None)
        if slot is not None:
            self._sequences.close(slot)
        return slot is not None

    def unpin_all(self) -> bool:
        """Unpin all prefixes; return True if there were any."""
        had_some = bool(self._slots)
        for prefix in list(self._slots):
            self.unpin(*prefix)
        return had_some
