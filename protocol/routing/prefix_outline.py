"""An outline of the prefix caches of several engines, from the engines' own reports."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from quire.protocol.messages import PrefixReport

MAX_PAGES = 1 << 20
"""Pages that an outline holds at most, of all engines together; what they report beyond is left out."""

_TOKEN_BYTES = 4
_CLEANED_AT_ONCE = 4096  # keys: a millisecond or two


def page_keys(salt: str, tokens: Sequence[int], block_size: int) -> list[int]:
    """Return a key for each prefix of `tokens` that ends with a full page, the shortest first.

    A key is a hash of 64 bits that holds for this process alone.
    """
    return list(_chain(hash(salt), tokens, block_size))


def shared_root(salt: str) -> int:
    """Return the key of the empty prefix of a salt, for `shared_chain`."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little", signed=True)


def shared_chain(key: int, tokens: Sequence[int], block_size: int) -> Iterator[int]:
    """Yield the keys of the prefixes that extend the one with this key by one page of `tokens` after the other.

    A key is a hash of 64 bits that is the same in all processes of one version of Python, since integers have no
    secret in their hash. So prompts can be made whose keys are equal: they may be believed to be cached where they are
    not, and no more must depend on them.
    """
    for (page,) in _pages(tokens, block_size):
        key = hash((key, block_size, int.from_bytes(page, "little")))
        yield key


def shared_page_keys(salt: str, tokens: Sequence[int], block_size: int) -> list[int]:
    """Return what `page_keys` does, with keys that all processes share."""
    return list(shared_chain(shared_root(salt), tokens, block_size))


def _chain(key: int, tokens: Sequence[int], block_size: int) -> Iterator[int]:
    """Yield the keys of the prefixes that extend the one with this key by one page of `tokens` after the other."""
    for (page,) in _pages(tokens, block_size):
        key = hash((key, page))
        yield key


def _pages(tokens: Sequence[int], block_size: int) -> Iterator[tuple[bytes]]:
    """Return the full pages of tokens, as the only entry of a tuple each."""
    count = len(tokens) // block_size * block_size
    packed = struct.pack(f"{count}i", *tokens[:count])
    return struct.iter_unpack(f"{_TOKEN_BYTES * block_size}s", packed)


@dataclass(slots=True)
class _OutlinedEngine:
    """An engine: the bit that stands for it, the tokens of a page, and the requests that compute a prefix, by key.

    `replaced`: the keys of its last `PrefixOutline.replace`.
    """

    bit: int
    block_size: int
    counts: dict[int, int] = field(default_factory=dict)
    replaced: frozenset[int] = frozenset()


class PrefixOutline:
    """The pages that each engine has in its prefix cache, and those that it is about to compute.

    Its memory is about 200 bytes for each page that any engine has, however many of them have it. Thread-safe. What an
    engine has is told by `report`, or else by `replace`, with `keys_of=shared_page_keys`.
    """

    def __init__(
        self, max_pages: int = MAX_PAGES, keys_of: Callable[[str, Sequence[int], int], list[int]] = page_keys
    ) -> None:
        self._keys_of = keys_of
        self.num_left_out = 0  # pages that were reported and not taken, as there was no room
        self._max_pages = max_pages
        self._lock = threading.Lock()
        self._engines: dict[int, _OutlinedEngine] = {}
        self._numbers: dict[int, dict[int, int]] = {}  # engines by block size and bit
        self._owners: dict[int, int] = {}  # engines that have a prefix, as bits, by its key
        self._keys: dict[int, int] = {}  # by the engines' own keys, of which a report speaks
        self._roots: dict[int, int] = {}  # the same for empty prefixes
        self._expected: dict[int, int] = {}  # engines that compute a prefix, as bits, by its key
        self._gone = 0  # bits of engines that are gone, which some owners still have
        self._cleaned = 0  # those of them that are being taken away
        self._unclean: list[int] = []  # engines' own keys that are still to be looked at for it
        self._unexpected: list[tuple[int, list[int]]] = []  # bits of engines that are gone, and keys expected of them

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, engine: int, block_size: int) -> None:
        """Add an engine with an empty cache whose pages have `block_size` tokens; one that is there loses its pages."""
        self.remove(engine)
        with self._lock:
            unused = ~(self._gone | sum(each.bit for each in self._engines.values()))
            bit = unused & -unused
            self._engines[engine] = _OutlinedEngine(bit, block_size)
            self._numbers.setdefault(block_size, {})[bit] = engine

    def remove(self, engine: int) -> None:
        """Remove an engine with its pages, and all that is expected of it. Without effect if it is not there."""
        with self._lock:
            if (gone := self._engines.pop(engine, None)) is None:
                return
            del self._numbers[gone.block_size][gone.bit]
            if not self._numbers[gone.block_size]:
                del self._numbers[gone.block_size]
            if gone.counts:
                self._unexpected.append((gone.bit, list(gone.counts)))
            self._gone |= gone.bit
            self._clean()

    def report(self, engine: int, report: PrefixReport) -> None:
        """Take a report of an engine. Without effect if the engine is not there."""
        with self._lock:
            if (its := self._engines.get(engine)) is None:
                return
            for number, salt in report.roots:
                self._roots[number] = hash(salt)
            for removed in report.removed:
                self._take_page(removed, its.bit)
            for parent, own_keys, tokens in report.stored:
                key = self._keys.get(parent, self._roots.get(parent))
                if key is None:  # what is before it was left out
                    self.num_left_out += len(own_keys)
                else:
                    self._add_pages(own_keys, _chain(key, tokens, its.block_size), its.bit)
            self._clean()

    def replace(self, engine: int, keys: Sequence[int]) -> None:
        """Take the keys of all prefixes that an engine has, each after those that it extends.

        Without effect if the engine is not there.
        """
        with self._lock:
            if (its := self._engines.get(engine)) is None:
                return
            new = frozenset(keys)
            for key in its.replaced - new:
                self._take_page(key, its.bit)
            added = [key for key in keys if key not in its.replaced]
            self._add_pages(added, added, its.bit)
            its.replaced = new
            self._clean()

    def expect(self, engine: int, keys: Iterable[int]) -> None:
        """Count the prefixes of a prompt as cached, since the engine is about to compute them."""
        with self._lock:
            its = self._engines[engine]
            bit, counts, expected = its.bit, its.counts, self._expected
            for key in keys:
                if count := counts.get(key, 0):
                    counts[key] = count + 1
                else:
                    counts[key] = 1
                    expected[key] = expected.get(key, 0) | bit

    def expect_no_more(self, engine: int, keys: Iterable[int]) -> None:
        """Undo `expect`: the engine has reported them, or will not compute them. Without effect if it is not there."""
        with self._lock:
            if (its := self._engines.get(engine)) is None:
                return
            for key in keys:
                if count := its.counts[key] - 1:
                    its.counts[key] = count
                else:
                    del its.counts[key]
                    _clear(self._expected, key, its.bit)

    def prefixes(self, salt: str, tokens: Sequence[int]) -> dict[int, list[int]]:
        """Return the keys of a prompt's prefixes for each block size that engines have."""
        with self._lock:
            sizes = list(self._numbers)
        return {size: self._keys_of(salt, tokens, size) for size in sizes}

    def match(self, prefixes: Mapping[int, Sequence[int]], *, only_stored: bool = False) -> dict[int, int]:
        """Return how many of the first tokens of a prompt each engine has, or will have, but for those with none.

        `prefixes` are what the method of this name returns. With `only_stored` what they will have does not count.
        """
        found: dict[int, int] = {}
        with self._lock:
            for block_size, keys in prefixes.items():
                engines = self._numbers.get(block_size, {})
                for bits, count in self._match(sum(engines), keys, {} if only_stored else self._expected):
                    found.update((engines[bit], count * block_size) for bit in _single_bits(bits))
        return found

    def _match(self, left: int, keys: Sequence[int], expected: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Yield, for the engines of `left`, how many of the keys they have from the first on, if any.

        Engines come as bits, those with the same number together.
        """
        owners = self._owners
        count = 0
        for key in keys:
            having = left & (owners.get(key, 0) | expected.get(key, 0))
            if having != left:
                if count:
                    yield left & ~having, count
                left = having
                if not left:
                    return
            count += 1
        if count:
            yield left, count

    def _add_pages(self, own_keys: Sequence[int], keys: Iterable[int], bit: int) -> None:
        """Add pages that follow one another. What comes after a page that finds no room would be found by nobody."""
        for number, (own_key, key) in enumerate(zip(own_keys, keys, strict=True)):
            owners = self._owners.get(key)
            if owners is not None:
                self._owners[key] = owners | bit
            elif len(self._owners) < self._max_pages:
                self._owners[key] = bit  # an object that all pages share
            else:
                self.num_left_out += len(own_keys) - number
                return
            self._keys.setdefault(own_key, key)

    def _take_page(self, own_key: int, bits: int) -> None:
        """Take a page from some engines; forget its key if no other has it."""
        key = self._keys.get(own_key)
        if key is not None and _clear(self._owners, key, bits):
            del self._keys[own_key]

    def _clean(self) -> None:
        """Drop some of what engines have left that are gone. All is looked at over several calls, none of them long."""
        if self._unexpected:
            bit, keys = self._unexpected[-1]
            for key in keys[-_CLEANED_AT_ONCE:]:
                _clear(self._expected, key, bit)
            del keys[-_CLEANED_AT_ONCE:]
            if not keys:
                self._unexpected.pop()
            if self._unexpected:
                return
        if not self._unclean:
            if not self._gone and len(self._keys) <= 2 * self._max_pages:
                return
            self._cleaned, self._unclean = self._gone, list(self._keys)
        for own_key in self._unclean[-_CLEANED_AT_ONCE:]:
            self._take_page(own_key, self._cleaned)
        del self._unclean[-_CLEANED_AT_ONCE:]
        if not self._unclean:
            self._gone &= ~self._cleaned


def _clear(sets: dict[int, int], key: int, bits: int) -> bool:
    """Take bits from a set of bits, and the set away if it is empty then; return True if it is not there any more."""
    if left := sets.get(key, 0) & ~bits:
        sets[key] = left
        return False
    sets.pop(key, None)
    return True


def _single_bits(bits: int) -> Iterator[int]:
    while bits:
        yield (bit := bits & -bits)
        bits ^= bit
