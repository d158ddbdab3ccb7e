"""The interface of a tier, and a fetch from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Key = bytes
"""The key of a prefix that a full page ends (`Sequences.keys`): equal keys, equal KV, also in other processes."""


@dataclass(eq=False)
class Fetch:
    """Pages on their way into KV memory: `keys[i]` into page `pages[i]`.

    They belong to a prefix, whose tokens and one more are `tokens`: they are its last pages. Of a model with state the
    first `num_states` are not pages of the prefix, but pieces of the state after it, or after fewer of its pages if not
    all come (`Sequences.state_pages`). The first `len(contents)` have come, with these checksums; nobody else uses the
    others until the fetch is done. `done` is called once, on any thread, when nothing is written to the pages any more.
    `is_whole` tells that these are all that there are, if they are fewer than were asked for.

    `is_expected`: another engine is about to compute the prefix, and pages that are not there yet will come.
    """

    keys: Sequence[Key]
    pages: Sequence[int]
    done: Callable[[Fetch], None]
    tokens: Sequence[int] = ()
    cache_salt: str = ""
    is_expected: bool = False
    num_states: int = 0
    is_whole: bool = False
    contents: list[int] = field(default_factory=list)


class KvTier(Protocol):
    """A tier. All methods return at once; the step loop calls them."""

    def find(self, keys: Sequence[Key]) -> int:
        """Return how many of the first of these pages there are, or may be if that is not known here."""

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that a request uses these pages, be they here or not: they are to be kept for longer."""

    def seconds(self, num_pages: int) -> float:
        """Return the time that fetching so many is likely to take, after all that are being fetched."""

    def fetch(self, fetch: Fetch) -> None:
        """Begin a fetch of pages that `find` has found."""

    def cancel(self, fetch: Fetch) -> None:
        """End a fetch with what has come: it is done soon, even if the tier hangs."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name."""

    def stop(self) -> bool:
        """End the threads; open fetches may never be done. Return False if a thread can't be ended."""
