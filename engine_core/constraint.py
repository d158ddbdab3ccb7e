"""What a grammar allows one request to write next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from itertools import takewhile
from typing import TYPE_CHECKING

from quire.kernels.runner import TokenMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_UNKNOWN_SECONDS = 1e-3  # that a first mask may take
_MOST_GUESS_SECONDS = 1e-4  # that a mask may take which is written while nothing else goes on
_MOST_DOUBLINGS = 4  # of a pause
_FORGET = 0.7  # of what a mask took, at each that takes less
_MOST_WORDS = 500  # characters of what llguidance says


class Constraint:
    """A request's place in its grammar, and the mask of its next token.

    Tokens may be taken from `forced` and given to the request at once; the others are drawn one by one, ahead of the
    mask if what is drawn can be taken, or else by a mask that allows nothing else. From `begin_mask` to the end of
    `write_mask` it belongs to the thread that writes, and else to the step loop.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int, stop_token_ids: Collection[int]
    ) -> None:
        """`stop_token_ids` may be drawn where the text may end; eos tokens that are none of them are never drawn."""
        num_tokens = tokenizer.vocab_size
        self.mask = TokenMask(max(num_tokens, vocab_size))
        self.mask_seconds = _UNKNOWN_SECONDS  # what the next mask is likely to take
        self.error: str | None = None  # why it can't go on
        self.draws_from_all: bool | None = None  # as Sequences have it; None: not asked yet
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._mask_address = self.mask.address
        self._mask_bytes = (num_tokens + 31) // 32 * 4  # of the tokenizer's tokens: others are never allowed
        self._stop_token_ids = sorted(stop_token_ids)
        self._ignored = [token for token in tokenizer.eos_tokens if token not in stop_token_ids]
        self.forced: deque[int] = deque()  # must come next; the matcher has them already
        self._num_refused = 0  # rounds of guesses, one after the other, of which none could be taken
        self._pause = 0  # tokens that are to be drawn by masks
        self._is_stopped = False
        self._has_mask = False
        self._has_taken = False  # the matcher has the next token already

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""
        return self._is_stopped and not self.forced

    @property
    def has_ended(self) -> bool:
        """Whether it allows nothing more, or there is an `error`."""
        return (self._is_stopped and not self.forced) or self.error is not None

    @property
    def may_guess(self) -> bool:
        """Whether the next token is to be drawn ahead of its mask, which would take little if it is needed then.

        The token is the same in either case.
        """
        return bool(
            self.draws_from_all
            and not (self.forced or self._has_mask or self._pause)
            and self.mask_seconds <= _MOST_GUESS_SECONDS
        )

    def take(self, token_id: int) -> bool:
        """Goes on by a token that was drawn ahead of the mask, if it may come; `follow` is to be called for it next."""
        if token_id in self._ignored:  # which may come if nothing else may
            return False
        if token_id < self._num_tokens and self._matcher.try_consume_tokens([token_id]):
            self._has_taken = True
            self._num_refused = 0
            return True
        return token_id in self._stop_token_ids and self._matcher.is_accepting()

    def pause(self) -> None:
        """None of the guesses may come: for a while, the longer the more often, tokens are drawn by masks."""
        self._pause = 1 << min(self._num_refused, _MOST_DOUBLINGS)  # this token is one of them
        self._num_refused += 1

    def follow(self, token_id: int) -> None:
        """Goes on by a token that is allowed; `forced` are those that must come then. Of every token."""
        self._has_mask = False
        self._pause -= self._pause > 0
        matcher, forced = self._matcher, self.forced
        if forced:
            forced.popleft()
        elif not (self._has_taken or matcher.consume_token(token_id)):
            self.error = self._explain()
        elif matcher.is_stopped():
            self._is_stopped = True
        elif token_ids := matcher.compute_ff_tokens():
            forced.extend(takewhile(self._vocab_size.__gt__, token_ids))  # a tokenizer may have more than the model
            if forced and not matcher.consume_tokens(list(forced)):
                self.error = self._explain()
            self._num_refused = self._pause = 0  # other text begins
            self._is_stopped = matcher.is_stopped()
        self._has_taken = False

    def begin_mask(self) -> bool:
        """Whether the mask of the next token is still to be written; then this takes it from the sampler."""
        if self._has_mask:
            return False
        self._has_mask = True
        self.mask.reset()
        return True

    def write_mask(self) -> None:
        """Computes the mask and hands it to the sampler."""
        begun = time.thread_time()
        mask, matcher = self.mask, self._matcher
        if self.forced:
            mask.ban_all()
            mask.allow([self.forced[0]])
        else:
            matcher.unsafe_compute_mask_ptr(self._mask_address, self._mask_bytes)
            if matcher.is_accepting():
                mask.allow(self._stop_token_ids)
            elif matcher.is_error():
                self.error = self._explain()
            self._ban_ignored()
        seconds = time.thread_time() - begun
        self.mask_seconds = max(seconds, _FORGET * self.mask_seconds)
        mask.publish()

    def _ban_ignored(self) -> None:
        """Takes away the eos tokens that don't stop, if something is left."""
        if self._ignored:
            self.mask.ban(self._ignored)
            if not self.mask.allows_any:
                self.mask.allow(self._ignored)

    def _explain(self) -> str:
        return f"the grammar can't be followed any further: {shorten(self._matcher.get_error())}"


def shorten(words: str) -> str:
    """What llguidance says, without what it adds for its developers."""
    return words.replace("<non-verbose/>", "").strip()[:_MOST_WORDS]
