"""How much of prompts a step may compute, so that those who decode beside it hardly notice.

Cost is counted in tokens at the start of a prompt. One that attends to `attention_context` tokens costs twice as much,
as its attention takes as many operations as all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request

_OLDEST_SHARE = 4  # the oldest prompt gets one part of so many at least
_LEAST_COST = 24.0  # of a step's prompts: what less takes can't be told from what a step takes anyway
_NO_BOUND = 1e15  # but the tokens of a step
_BLEND = 0.1  # weight of a new measurement
_STRETCH = 1.7  # times a step without prompts: what a step with prompts may take
_MOST_STRETCH = 4.0
_BACKLOG_SECONDS = 4.0  # of prefill that waits, for each step's time more
_ALONE_SECONDS = 0.5  # of a step in which nobody decodes: how long one who comes may have to wait


class Pace:
    """Learns from the steps what the prompts and what the decodes take, in seconds."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._token_seconds = 0.0  # for a cost of 1
        self._decode_seconds = 0.0  # of a step without prompts

    def learn(self, prefill_cost: float, num_decodes: int, seconds: float) -> None:
        """One step took so long. Of a few tokens it can't be told what they took."""
        if prefill_cost == 0:
            self._decode_seconds = _blend(self._decode_seconds, seconds)
        elif prefill_cost >= _LEAST_COST:
            rest = seconds - (self._decode_seconds if num_decodes else 0.0)
            self._token_seconds = _blend(self._token_seconds, max(rest, 0.1 * seconds) / prefill_cost)

    def cost_of_token(self, position: float) -> float:
        """What a token at this position costs."""
        return 1 + position / self._limits.attention_context

    def budget(self, num_decodes: int, backlog: int) -> float:
        """The cost that the prompts of the next step may have, when `backlog` tokens are still to be computed."""
        if self._token_seconds == 0.0 or self._limits.long_prefill_token_threshold > 0:
            return _NO_BOUND
        seconds = _ALONE_SECONDS
        if num_decodes and self._decode_seconds:
            stretch = min(_STRETCH + backlog * self._token_seconds / _BACKLOG_SECONDS, _MOST_STRETCH)
            seconds = (stretch - 1) * self._decode_seconds
        return max(_LEAST_COST, min(seconds / self._token_seconds, _NO_BOUND))  # infinite after steps of no time

    def prefill_cost(self, shares: Iterable[tuple[Request, int]]) -> float:
        """What chunks of prompts cost: so many tokens of each request, from where it stands."""
        return sum(count * self.cost_of_token(request.num_computed_tokens + count / 2) for request, count in shares)

    def share(self, prefills: Sequence[Request], tokens: int, budget: float) -> list[tuple[Request, int]]:
        """How many of `tokens`, of a cost of at most `budget`, each prompt gets.

        Those with the fewest left come first, but the oldest never gets less than its share. Chunks end with whole
        tiles where that is possible. The oldest gets a token of those that are left, whatever the budget.
        """
        if not prefills:
            return []
        oldest = min(prefills, key=lambda request: request.number)
        shares: list[tuple[Request, int]] = []
        kept_tokens = min(oldest.num_new_tokens, -(-tokens // _OLDEST_SHARE))
        kept_budget = budget / _OLDEST_SHARE
        for request in sorted(prefills, key=lambda request: (request.num_new_tokens, request.number)):
            if request is oldest:
                kept_tokens, kept_budget = 0, 0.0
            cost = self.cost_of_token(request.num_computed_tokens)
            left = request.num_new_tokens
            affordable = round((budget - kept_budget) / cost)
            count = min(left, tokens - kept_tokens, self._limits.long_prefill_token_threshold or left, affordable)
            if request is oldest:
                count = max(count, min(1, tokens))
            if self._limits.tile < count < left:
                count -= (request.num_computed_tokens + count) % self._limits.tile
            if count > 0:
                shares.append((request, count))
                tokens -= count
                budget -= count * cost
        return shares


def _blend(old: float, new: float) -> float:
    """Now and then a step takes many times as long as it should, for no reason of its own: that must not count much."""
    return old + _BLEND * (min(new, 2 * old) - old) if old else new
