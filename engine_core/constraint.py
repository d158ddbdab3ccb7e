"""What a grammar allows one request to write next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from quire.kernels.runner import TokenMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_UNKNOWN_SECONDS = 1.0  # what a first mask may take
_FORGET = 0.7  # of what a mask took, at each that takes less
_MOST_WORDS = 500  # characters of what llguidance says


class Constraint:
    """A request's place in its grammar, and the mask of its next token.

    Tokens may be taken from `forced` and given to the request at once; the others are drawn one by one, by masks that
    allow nothing else. From `begin_mask` to the end of `write_mask` it belongs to the thread that writes, and else to
    the step loop.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int, stop_token_ids: Collection[int]
    ) -> None:
        """`stop_token_ids` may be drawn where the text may end; eos tokens that are none of them are never drawn."""
        num_tokens = tokenizer.vocab_size
        self.mask = TokenMask(max(num_tokens, vocab_size))
        self.mask_seconds = _UNKNOWN_SECONDS  # what the next mask is likely to take
        self.error: str | None = None  # why it can't go on
        self._matcher = matcher
        self._mask_bytes = (num_tokens + 31) // 32 * 4  # of the tokenizer's tokens: others are never allowed
        self._stop_token_ids = sorted(stop_token_ids)
        self._ignored = [token for token in tokenizer.eos_tokens if token not in stop_token_ids]
        self.forced: deque[int] = deque()  # must come next; the matcher has them already
        self._has_mask = False

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""
        return not self.forced and self._matcher.is_stopped()

    @property
    def has_ended(self) -> bool:
        """Whether it allows nothing more, or there is an `error`."""
        return self.error is not None or self.is_complete

    def follow(self, token_id: int) -> None:
        """Goes on by a token that the mask has allowed; `forced` are those that must come then."""
        self._has_mask = False
        if self.forced:
            self.forced.popleft()
        elif not self._matcher.consume_token(token_id):
            self.error = self._explain()
        if not self.forced and not self._matcher.is_stopped():
            self._look_ahead()

    def _look_ahead(self) -> None:
        self.forced.extend(self._matcher.compute_ff_tokens())
        if self.forced and not self._matcher.consume_tokens(list(self.forced)):
            self.error = self._explain()

    def begin_mask(self) -> bool:
        """Whether the mask of the next token is still to be written; then this takes it from the sampler."""
        if self._has_mask:
            return False
        self._has_mask = True
        self.mask.reset()
        return True

    def write_mask(self) -> None:
        """Computes the mask and hands it to the sampler."""
        begun = time.perf_counter()
        if self.forced:
            self.mask.ban_all()
            self.mask.allow([self.forced[0]])
        else:
            self._matcher.unsafe_compute_mask_ptr(self.mask.address, self._mask_bytes)
            if self._matcher.is_error():
                self.error = self._explain()
            else:
                self._allow_to_end()
        self.mask_seconds = max(time.perf_counter() - begun, _FORGET * self.mask_seconds)
        self.mask.publish()

    def _allow_to_end(self) -> None:
        if self._matcher.is_accepting():
            self.mask.allow(self._stop_token_ids)
        if self._ignored:
            self.mask.ban(self._ignored)
            if not self.mask.allows_any:
                self.mask.allow(self._ignored)

    def _explain(self) -> str:
        return f"the grammar can't be followed any further: {shorten(self._matcher.get_error())}"


def shorten(words: str) -> str:
    """What llguidance says, without what it adds for its developers."""
    return words.replace("<non-verbose/>", "").strip()[:_MOST_WORDS]
