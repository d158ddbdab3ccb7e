"""A tier over a PagedExecutor, under the test's control."""

from __future__ import annotations

from collections.abc import Sequence

from paged_executor import PagedExecutor

from quire.engine_core.kv_tiers.tier import Fetch, Key


class FilledTier:
    """A tier that the test fills, and whose fetches it completes."""

    def __init__(self, executor: PagedExecutor) -> None:
        self.executor = executor
        self.pages: dict[Key, list[int]] = {}  # the tokens of the prefix
        self.fetches: list[Fetch] = []
        self.cancelled: list[Fetch] = []
        self.touched: list[Sequence[Key]] = []
        self.slowness = 0.0  # seconds a page
        self.in_flight = 0  # pages before all others

    def put(self, tokens: list[int], salt: str = "") -> None:
        """Put the full pages of a prefix there."""
        sequences, size = self.executor.sequences, self.executor.limits.block_size
        slot = sequences.open([*tokens, 0], 1, cache_salt=salt)
        keys = sequences.keys(slot)
        sequences.close(slot)
        self.pages.update({key: tokens[: i * size] for i, key in enumerate(keys) if i})

    def fill(self, num_pages: int) -> None:
        """Let some more pages of the oldest fetch come."""
        (fetch, *_) = self.fetches
        for key, page in list(zip(fetch.keys, fetch.pages, strict=True))[len(fetch.contents) :][:num_pages]:
            self.executor.fill(page, self.pages[key])
            fetch.contents.append(7)

    def complete(self, num_pages: int = 1000) -> None:
        """Let the oldest fetch come, up to so many pages, and end."""
        self.fill(num_pages)
        fetch = self.fetches.pop(0)
        fetch.done(fetch)

    def find(self, keys: Sequence[Key]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def touch(self, keys: Sequence[Key]) -> None:
        self.touched.append(keys)

    def seconds(self, num_pages: int) -> float:
        return self.slowness * (self.in_flight + num_pages)

    def fetch(self, fetch: Fetch) -> None:
        self.fetches.append(fetch)

    def cancel(self, fetch: Fetch) -> None:
        self.cancelled.append(fetch)

    def stats(self) -> dict[str, float]:
        return {"kv_test_pages": len(self.pages)}

    def stop(self) -> bool:
        return True
