"""The prefill budget: how much of prompts a step computes, so that decoding requests hardly slow down.

Cost is counted in tokens at the start of a prompt. A token that attends to `attention_context` tokens costs twice as
much, as its attention takes as many operations as all else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from quire.engine_core.averages import blend
from quire.protocol.engine_shape import EngineShape

_OLDEST_SHARE = 4  # the oldest prompt gets at least one part in four
_WAITED_SECONDS = 0.1  # that each prompt seems to have waited for before it came: until then the shortest is first
_LEAST_COST = 24.0  # of a step's prompts: less does not show in a step's time
_FIRST_COST = 32.0  # beside decoding requests, while the time of prompts is not known
_UNBOUNDED = 1e15  # only max_num_batched_tokens bounds the step
_STRETCH = 1.7  # a step with prompts may take this many times a step without, however long the target
_MAX_STRETCH = 4.0
_BACKLOG_SECONDS = 4.0  # of waiting prefill that stretch a step by its own time once more
_ALONE_SECONDS = 0.5  # of a step in which no request decodes: how long a new request may have to wait


class PrefillRequest(Protocol):
    """A request in prefill, as it is, or as it will be after some more steps."""

    @property
    def number(self) -> int:
        """Its place in order of arrival."""

    @property
    def arrival(self) -> float:
        """When the engine received it."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that are computed."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are not."""


P = TypeVar("P", bound=PrefillRequest)


class PrefillBudget:
    """Learns from measured steps how many seconds prefill and decode take, and budgets prefill accordingly.

    A step may take as long as the target, or if decoding alone takes nearly as long or longer, some times as long as
    that: small models gain nothing from shorter steps, and large ones can't have them.
    """

    def __init__(self, limits: EngineShape) -> None:
        self._limits = limits
        self._target_seconds = limits.target_itl / 1e3
        self._token_seconds = 0.0  # for a cost of 1
        self._decode_seconds = 0.0  # of a step without prompts
        self._has_learned = False

    def learn(self, prefill_cost: float, num_decodes: int, seconds: float) -> None:
        """Learn from one step's time. A few prompt tokens do not show in it and teach nothing."""
        least = 0.1 * seconds  # that either part of a step takes
        if prefill_cost == 0:
            self._decode_seconds = blend(self._decode_seconds, seconds)
        elif prefill_cost >= _LEAST_COST:
            if num_decodes and self._has_learned and not self._decode_seconds:
                self._decode_seconds = max(seconds - prefill_cost * self._token_seconds, least)
            rest = seconds - (self._decode_seconds if num_decodes else 0.0)
            self._token_seconds = blend(self._token_seconds, max(rest, least) / prefill_cost)
            self._has_learned = True

    def max_cost(self, num_decodes: int, backlog: int) -> float:
        """Return the cost that the prompts of the next step may have, with `backlog` prompt tokens left to compute."""
        if self._limits.long_prefill_token_threshold:
            return _UNBOUNDED
        if not self._has_learned:
            return _FIRST_COST if num_decodes else _UNBOUNDED
        seconds = self._seconds_beside(self._decode_seconds, backlog) if num_decodes else _ALONE_SECONDS
        if not self._token_seconds:  # after steps of no time
            return _UNBOUNDED
        return max(_LEAST_COST, min(seconds / self._token_seconds, _UNBOUNDED))

    def _seconds_beside(self, decode_seconds: float, backlog: int) -> float:
        """Return how long the prompts of a step may take whose decodes take `decode_seconds`."""
        stretch = min(_STRETCH + backlog * self._token_seconds / _BACKLOG_SECONDS, _MAX_STRETCH)
        return max((stretch - 1) * decode_seconds, self._target_seconds - decode_seconds)

    def seconds(self, start: int, end: int) -> float:
        """Return the time that computing tokens [start, end) of a prompt takes; infinite before it was measured."""
        cost = (end - start) * self.token_cost((start + end) / 2)
        return cost * self._token_seconds if self._token_seconds else math.inf

    @property
    def token_seconds(self) -> float:
        """Time that a token at the start of a prompt takes; 0 before it was measured."""
        return self._token_seconds

    def token_cost(self, position: float) -> float:
        """Return the cost of a token at this position."""
        return 1 + position / self._limits.attention_context

    def cost(self, shares: Iterable[tuple[PrefillRequest, int]]) -> float:
        """Return the cost of prompt chunks: the next `count` tokens of each prompt."""
        return sum(count * self.token_cost(prompt.num_computed_tokens + count / 2) for prompt, count in shares)

    def least_chunk(self, prompt: PrefillRequest) -> int:
        """Return the tokens of the smallest chunk of a prompt that is worth a row: a tile, or all that is left."""
        return min(prompt.num_new_tokens, self._limits.tile)

    def share(self, prefills: Sequence[P], max_tokens: int, max_cost: float, now: float) -> list[tuple[P, int]]:
        """Return how many of `max_tokens`, at a cost of at most `max_cost`, each prompt gets.

        Prompts that have waited longest for the tokens they have left come first, as in highest response ratio next:
        of those that have just come the shortest. The oldest never gets less than its share. Chunks end with whole
        tiles where that is possible. The oldest gets one of the remaining tokens, whatever the cost.
        """
        if not prefills:
            return []
        oldest = min(prefills, key=lambda prompt: prompt.number)
        shares: list[tuple[P, int]] = []
        kept_tokens = min(oldest.num_new_tokens, -(-max_tokens // _OLDEST_SHARE))
        kept_cost = max_cost / _OLDEST_SHARE
        now += _WAITED_SECONDS
        for prompt in sorted(prefills, key=lambda prompt: prompt.num_new_tokens / (now - prompt.arrival)):
            if prompt is oldest:
                kept_tokens, kept_cost = 0, 0.0
            computed, left = prompt.num_computed_tokens, prompt.num_new_tokens
            cost = self.token_cost(computed)
            affordable = round((max_cost - kept_cost) / cost)
            count = min(left, max_tokens - kept_tokens, self._limits.long_prefill_token_threshold or left, affordable)
            if prompt is oldest:
                count = max(count, min(1, max_tokens))
            if self._limits.tile < count < left:
                count -= (computed + count) % self._limits.tile
            if count > 0:
                shares.append((prompt, count))
                max_tokens -= count
                max_cost -= count * cost
        return shares
