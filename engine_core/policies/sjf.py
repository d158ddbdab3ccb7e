"""The shortest job first."""

from __future__ import annotations

from quire.engine_core.policies.base import Policy
from quire.engine_core.request import Request

TOKENS_A_SECOND = 1000.0
"""Who has waited for a second counts as shorter by so many tokens."""


class ShortestJobFirst(Policy):
    """The fewest tokens left to prefill first. A long prompt gets shorter by waiting, so nobody waits for ever."""

    def key(self, request: Request) -> float:
        """All age alike, so the order of two of them never changes."""
        return request.arrival * TOKENS_A_SECOND + request.num_new_tokens
