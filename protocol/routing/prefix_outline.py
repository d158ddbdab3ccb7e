"""An outline of the prefix caches of several engines, from the engines' own reports."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence

from quire.protocol.messages import PrefixReport

MAX_PAGES = 1 << 18
"""Pages that an outline holds at most, of all engines together; what they report beyond is left out."""

_TOKEN_BYTES = 4


def page_keys(salt: str, tokens: Sequence[int], block_size: int) -> Iterator[int]:
    """Yield a key for each prefix of `tokens` that ends with a full page, the shortest first.

    A key is a hash of 64 bits that holds for this process alone.
    """
    return _chain(hash(salt), tokens, block_size)


def _chain(key: int, tokens: Sequence[int], block_size: int) -> Iterator[int]:
    size = _TOKEN_BYTES * block_size
    packed = array("i", tokens[: len(tokens) // block_size * block_size]).tobytes()
    for start in range(0, len(packed), size):
        key = hash((key, packed[start : start + size]))
        yield key


class PrefixOutline:
    """The pages that each engine has in its prefix cache, and those that it is about to compute.

    Its memory is about 350 bytes for each page that any engine has, however many of them have it. Thread-safe.
    """

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self.num_left_out = 0  # pages that were reported and not taken, as there was no room
        self._max_pages = max_pages
        self._lock = threading.Lock()
        self._bits: dict[int, int] = {}  # by engine
        self._block_sizes: dict[int, int] = {}  # by engine
        self._owners: dict[int, int] = {}  # engines that have a prefix, as bits, by its key
        self._keys: dict[int, int] = {}  # by the engines' own keys, of which a report speaks
        self._roots: dict[int, int] = {}  # the same for empty prefixes
        self._expected: dict[int, dict[int, int]] = {}  # requests that compute a prefix, by its key and the engine

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, engine: int, block_size: int) -> None:
        """Add an engine with an empty cache whose pages have `block_size` tokens; one that is there loses its pages."""
        self.remove(engine)
        with self._lock:
            used = set(self._bits.values())
            self._bits[engine] = next(bit for bit in (1 << place for place in range(len(used) + 1)) if bit not in used)
            self._block_sizes[engine] = block_size

    def remove(self, engine: int) -> None:
        """Remove an engine with its pages. Without effect if it is not there."""
        with self._lock:
            if (bit := self._bits.pop(engine, None)) is None:
                return
            del self._block_sizes[engine]
            self._owners = {key: left for key, owners in self._owners.items() if (left := owners & ~bit)}
            self._drop_unused_keys()

    def report(self, engine: int, report: PrefixReport) -> None:
        """Take a report of an engine. Without effect if the engine is not there."""
        with self._lock:
            if (bit := self._bits.get(engine)) is None:
                return
            for number, salt in report.roots:
                self._roots[number] = hash(salt)
            for removed in report.removed:
                self._take_page(removed, bit)
            for parent, own_keys, tokens in report.stored:
                key = self._keys.get(parent, self._roots.get(parent))
                if key is not None:  # else what is before it was left out
                    self._add_pages(zip(own_keys, _chain(key, tokens, self._block_sizes[engine]), strict=True), bit)
            if len(self._keys) > 2 * self._max_pages:
                self._drop_unused_keys()

    def expect(self, engine: int, keys: Iterable[int]) -> None:
        """Count the prefixes of a prompt as cached, since the engine is about to compute them."""
        with self._lock:
            for key in keys:
                counts = self._expected.setdefault(key, {})
                counts[engine] = counts.get(engine, 0) + 1

    def expect_no_more(self, engine: int, keys: Iterable[int]) -> None:
        """Undo `expect`: the engine has reported them, or will not compute them."""
        with self._lock:
            for key in keys:
                counts = self._expected[key]
                counts[engine] -= 1
                if not counts[engine]:
                    del counts[engine]
                if not counts:
                    del self._expected[key]

    def match(self, salt: str, tokens: Sequence[int]) -> dict[int, int]:
        """Return how many of the first tokens each engine has, or will have, under a salt."""
        found: dict[int, int] = {}
        with self._lock:
            for block_size in set(self._block_sizes.values()):
                engines = {self._bits[each]: each for each, size in self._block_sizes.items() if size == block_size}
                for bit, count in self._match(engines, page_keys(salt, tokens, block_size)):
                    found[engines[bit]] = count * block_size
        return found

    def _match(self, engines: dict[int, int], keys: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield the bit of each engine, and how many of the keys it has from the first on."""
        left, count = sum(engines), 0
        for key in keys:
            having = self._owners.get(key, 0)
            for engine in self._expected.get(key, ()):
                having |= self._bits.get(engine, 0)
            if gone := left & ~having:
                yield from ((bit, count) for bit in engines if bit & gone)
            left &= having
            if not left:
                return
            count += 1
        yield from ((bit, count) for bit in engines if bit & left)

    def _add_pages(self, pages: Iterable[tuple[int, int]], bit: int) -> None:
        for own_key, key in pages:
            owners = self._owners.get(key, 0)
            if not owners and len(self._owners) >= self._max_pages:
                self.num_left_out += 1
                return  # nor what follows it, which nobody would find
            self._owners[key] = owners | bit
            self._keys[own_key] = key

    def _take_page(self, own_key: int, bit: int) -> None:
        if (key := self._keys.get(own_key)) is None or key not in self._owners:
            return
        if left := self._owners[key] & ~bit:
            self._owners[key] = left
        else:
            del self._owners[key], self._keys[own_key]

    def _drop_unused_keys(self) -> None:
        self._keys = {own: key for own, key in self._keys.items() if key in self._owners}
