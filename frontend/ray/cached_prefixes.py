"""Keys of the prefixes that an engine has cached, as Ray Serve passes them on from a replica to the routers."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from quire.protocol.messages import PrefixReport
from quire.protocol.routing.prefix_outline import shared_chain, shared_root
from quire.protocol.routing.routers import RoundRobin

MAX_KEYS = 1 << 13
"""Keys that are passed on at most: 64 KiB, which Ray's controller sends to each router whenever any have changed."""

_MAX_PAGES = 1 << 20  # that are known; their memory is about 300 bytes each


class CachedPrefixes:
    """The prefixes that an engine has cached, from its reports."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a KV page."""
        self._block_size = block_size
        self._roots: dict[int, int] = {}  # keys of empty prefixes, by the engine's numbers
        self._depths: dict[int, int] = {}  # pages of each prefix, by the engine's numbers
        self._levels: list[dict[int, int]] = []  # keys by the engine's numbers, of the prefixes of 1 page, 2, ...

    def take(self, report: PrefixReport) -> None:
        """Take a report of the engine."""
        for root, salt in report.roots:
            self._roots[root] = shared_root(salt)
        for number in report.removed:
            if depth := self._depths.pop(number, 0):
                del self._levels[depth - 1][number]
        for parent, numbers, tokens in report.stored:
            depth = self._depths.get(parent, 0)
            key = self._levels[depth - 1][parent] if depth else self._roots.get(parent)
            if key is None or len(self._depths) + len(numbers) > _MAX_PAGES:  # as what comes after them, later
                continue
            for number, page_key in zip(numbers, shared_chain(key, tokens, self._block_size), strict=True):
                depth += 1
                if depth > len(self._levels):
                    self._levels.append({})
                self._depths[number] = depth
                self._levels[depth - 1][number] = page_key

    def clear(self) -> None:
        """Forget all: the engine is gone."""
        self._roots.clear()
        self._depths.clear()
        self._levels.clear()

    def encode(self) -> bytes:
        """Return the keys of the shortest prefixes, `MAX_KEYS` at most, the shortest first.

        So no key is without those of the prefixes that its own extends, and if there are more, all conversations are
        known by how they begin.
        """
        keys = array("q")
        for level in self._levels:
            keys.extend(list(level.values())[: MAX_KEYS - len(keys)])
            if len(keys) == MAX_KEYS:
                break
        return keys.tobytes()


def decode_keys(encoded: bytes) -> list[int]:
    """Return the keys that `CachedPrefixes.encode` has put together."""
    keys = array("q")
    keys.frombytes(encoded)
    return keys.tolist()


class ReportingRouter(RoundRobin):
    """The router of a client with one engine, whose reports it passes on; on the client's thread."""

    def __init__(self, on_report: Callable[[PrefixReport], None]) -> None:
        super().__init__()
        self._on_report = on_report

    def report(self, engine: int, report: PrefixReport) -> None:
        """Pass a report on."""
        del engine
        self._on_report(report)
