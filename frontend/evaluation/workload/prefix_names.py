"""Mooncake's names of prompt blocks: a number stands for a block's tokens and all tokens before them."""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from hashlib import blake2b
from itertools import count

MOST_KNOWN = 1 << 18
"""Number of remembered blocks, in some 50 MB; 8 million tokens in blocks of 32."""


class PrefixNames:
    """Names that count up from 0, so that they reveal nothing of their blocks; a name is unique to its prefix.

    The least recently used prefixes are forgotten, the last block of a prompt first; a forgotten block gets a new name.
    Only hashes under a random key are kept, no tokens.
    """

    def __init__(self, block_tokens: int, most_known: int = MOST_KNOWN) -> None:
        self._width = block_tokens * array("I").itemsize
        self._most_known = most_known
        self._key = secrets.token_bytes(32)
        self._names: OrderedDict[bytes, int] = OrderedDict()
        self._fresh = count()

    def names(self, token_ids: list[int], salt: str = "") -> list[int]:
        """Return the names of a prompt's blocks, of which the last may be partial. Another salt has other names."""
        digests = self._digests(array("I", token_ids).tobytes(), salt)
        names, known = [], self._names
        for digest in digests:
            name = known.get(digest)
            if name is None:
                name = known[digest] = next(self._fresh)
            names.append(name)
        for digest in reversed(digests):
            known.move_to_end(digest)
        while len(known) > self._most_known:
            known.popitem(last=False)
        return names

    def _digests(self, tokens: bytes, salt: str) -> list[bytes]:
        """Return a digest for each block, which depends on all blocks before it."""
        digest = blake2b(salt.encode(errors="surrogatepass"), key=self._key, digest_size=16).digest()
        digests = []
        for start in range(0, len(tokens), self._width):
            digest = blake2b(tokens[start : start + self._width], key=digest, digest_size=16).digest()
            digests.append(digest)
        return digests
