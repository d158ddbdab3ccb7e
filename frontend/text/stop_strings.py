"""The scanner for stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A prefix of stop strings, of `length` characters; `fallback` is its longest suffix that is also a prefix."""

    length: int = 0
    stop: str | None = None
    fallback: _Node | None = None
    children: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hit:
    """A stop string that was found; it ends after `end` characters of the scanned piece."""

    stop: str
    end: int


class StopScanner:
    """An Aho-Corasick automaton: constant time per character for any number of stop strings.

    The hit that ends first wins; of several that end at the same character, the longest. So the place of the cut
    depends only on the text, not on the pieces in which it arrives.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._root = _Node()
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty; leave it out")
            self._add(stop)
        self._link()
        self._state = self._root

    def _add(self, stop: str) -> None:
        node = self._root
        for char in stop:
            node = node.children.setdefault(char, _Node(length=node.length + 1))
        node.stop = stop

    def _link(self) -> None:
        """Set fallbacks in order of length; a node takes over the stop string that ends in its fallback."""
        queue = deque([self._root])
        while queue:
            node = queue.popleft()
            for char, child in node.children.items():
                child.fallback = self._root if node is self._root else self._next(node.fallback or self._root, char)
                child.stop = child.stop or child.fallback.stop
                queue.append(child)

    def _next(self, node: _Node, char: str) -> _Node:
        while char not in node.children:
            if node.fallback is None:
                return node
            node = node.fallback
        return node.children[char]

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        return self._state.length

    def scan(self, piece: str, ignore_hits: bool = False) -> Hit | None:
        """Scan the next piece of the text up to the first hit; `ignore_hits` skips hits that end in the piece."""
        for index, char in enumerate(piece):
            node = self._next(self._state, char)
            if node.stop is not None and not ignore_hits:
                self._state = node
                return Hit(node.stop, index + 1)
            while not node.children and node.fallback is not None:  # complete and ignored: no longer a prefix
                node = node.fallback
            self._state = node
        return None
