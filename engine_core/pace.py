"""How much of prompts a step may compute, so that those who decode beside it hardly notice.

Cost is counted in tokens at the start of a prompt. One that attends to `attention_context` tokens costs twice as much,
as its attention takes as many operations as all else.
"""

from __future__ import annotations

from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request

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
        """One step took so long."""
        if prefill_cost == 0:
            self._decode_seconds = _blend(self._decode_seconds, seconds)
        else:
            rest = seconds - (self._decode_seconds if num_decodes else 0.0)
            self._token_seconds = _blend(self._token_seconds, max(rest, 0.1 * seconds) / prefill_cost)

    def cost_of_token(self, position: float) -> float:
        """What a token at this position costs."""
        return 1 + position / self._limits.attention_context

    def budget(self, num_decodes: int, backlog: int) -> float:
        """The cost that the prompts of the next step may have, when `backlog` tokens are still to be computed."""
        most = float(self._limits.max_num_batched_tokens)
        if self._token_seconds == 0.0 or self._limits.long_prefill_threshold is not None:
            return most
        seconds = _ALONE_SECONDS
        if num_decodes and self._decode_seconds:
            stretch = min(_STRETCH + backlog * self._token_seconds / _BACKLOG_SECONDS, _MOST_STRETCH)
            seconds = (stretch - 1) * self._decode_seconds
        return min(most, max(1.0, seconds / self._token_seconds))

    def prefill_cost(self, requests: list[Request], counts: list[int]) -> float:
        """What chunks of prompts cost: `counts[i]` tokens of `requests[i]`, from where it stands."""
        return sum(
            count * self.cost_of_token(request.num_computed_tokens + count / 2)
            for request, count in zip(requests, counts, strict=True)
        )


def _blend(old: float, new: float) -> float:
    return old + _BLEND * (new - old) if old else new
