"""Reports of prefix caches as engines send them, with numbers of prefixes that are the same at all engines."""

from __future__ import annotations

from collections.abc import Sequence

from quire.protocol.messages import PrefixReport

Prefix = tuple[str, tuple[int, ...]]
"""A salt, and tokens that fill pages."""


class PrefixNumbers:
    """The numbers by which reports speak of prefixes, given as they are asked for."""

    def __init__(self) -> None:
        self._numbers: dict[Prefix, int] = {}

    def of(self, salt: str, tokens: Sequence[int]) -> int:
        """Return the number of a prefix."""
        return self._numbers.setdefault((salt, tuple(tokens)), len(self._numbers) + 1)

    def stored(self, tokens: Sequence[int], block_size: int, *, salt: str = "", after: int = 0) -> PrefixReport:
        """Return a report of the full pages of `tokens` after the first `after` tokens, which were there before."""
        ends = range(after + block_size, len(tokens) + 1, block_size)
        keys = [self.of(salt, tokens[:end]) for end in ends]
        run = (self.of(salt, tokens[:after]), keys, list(tokens[after : after + len(keys) * block_size]))
        return PrefixReport(roots=[(self.of(salt, ()), salt)], stored=[run] if keys else [])

    def removed(self, tokens: Sequence[int], *, salt: str = "") -> PrefixReport:
        """Return a report of the loss of the page at the end of `tokens`."""
        return PrefixReport(removed=[self.of(salt, tokens)])
