"""The queue of those that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.engine_core.policies.base import Policy
from quire.engine_core.request import Request


class WaitingQueue:
    """Requests in the order of their policy's keys, and then of their arrival."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[float, int, Request]] = []
        self.num_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def add(self, request: Request) -> None:
        """Queues a request, which keeps its place by `queue_key`."""
        request.queue_key = self._policy.key(request)
        insort(self._entries, (request.queue_key, request.number, request))
        self.num_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        index = bisect_left(self._entries, (request.queue_key, request.number))
        if index == len(self._entries) or self._entries[index][2] is not request:
            raise KeyError(request.request_id)
        del self._entries[index]
        self.num_tokens -= request.num_prompt_tokens
