"""The shortest job first."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from quire.engine_core.request import Request
from quire.engine_core.scheduling.policies.base import WINDOW, MatchOf, Policy
from quire.kernels.runner import Sequences

TOKENS_A_SECOND = 1000.0
"""Who has waited for a second counts as shorter by so many tokens."""


class ShortestJobFirst(Policy):
    """The fewest tokens left to prefill first. A long prompt gets shorter by waiting, so nobody waits for ever."""

    def key(self, request: Request) -> float:
        """As if nothing were cached. All age alike, so the order of two of them never changes."""
        return request.arrival * TOKENS_A_SECOND + request.num_new_tokens

    def arrange(self, waiting: Iterable[Request], match_of: MatchOf, sequences: Sequences) -> Iterable[Request]:
        """What the prefix cache holds counts as done."""
        del sequences
        keys = {
            request: request.queue_key - match[0]
            for request in islice(waiting, WINDOW)
            if (match := match_of(request)) is not None
        }
        return sorted(keys, key=keys.__getitem__)
