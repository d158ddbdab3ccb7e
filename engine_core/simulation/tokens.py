"""Tokens of simulated prompts and answers. They have no meaning: they only have to differ where they should.

A token is a byte, since Python keeps the small integers ready: the lists of a million prompts cost no objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

VOCAB_SIZE = 257
EOS = 256
"""The token that ends an answer of unknown length; no prompt has it."""

_NAME_TOKENS = 16  # of a block or an answer: enough that no two have the same, or any part of their pages
_ANSWERS = b"answers"


def prompt_tokens(blocks: Sequence[int], block_tokens: int, length: int) -> list[int]:
    """Return the first `length` tokens of a prompt of these blocks, which are equal where the blocks are.

    Raises ValueError if there are fewer blocks than the tokens need.
    """
    if len(blocks) * block_tokens < length or block_tokens < 1:
        raise ValueError(
            f"{len(blocks)} blocks of {block_tokens} tokens can't make a prompt of {length}; "
            f"give {-(-length // max(block_tokens, 1))} blocks"
        )
    size = min(block_tokens, _NAME_TOKENS)
    times = -(-block_tokens // size)
    prompt = b"".join((_name(block, size) * times)[:block_tokens] for block in blocks)
    return list(prompt[:length])


def answer_tokens(number: int) -> bytes:
    """Return tokens that no prompt and no other answer has, to be sampled in turn, over and over."""
    return _name(number, _NAME_TOKENS, _ANSWERS)


def _name(number: int, size: int, person: bytes = b"") -> bytes:
    return blake2b(number.to_bytes(16, "little", signed=True), digest_size=size, person=person).digest()
