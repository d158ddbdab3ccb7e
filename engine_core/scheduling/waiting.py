"""The queue of those that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.engine_core.request import Request
from quire.engine_core.scheduling.policies.base import Policy


class WaitingQueue:
    """Requests in the order of their policy's keys, and then of their arrival.

    Some can't start yet, whoever comes before them: they are held back, and count among those that wait.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[float, int, Request]] = []
        self._held: dict[Request, None] = {}
        self.num_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return len(self._entries) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self.ready()
        yield from self._held

    @property
    def has_ready(self) -> bool:
        """Whether one of them can start."""
        return bool(self._entries)

    def ready(self) -> Iterator[Request]:
        """Those that can start, in their order."""
        return (request for _, _, request in self._entries)

    def hold(self, request: Request) -> None:
        """Queues a request that can't start before it is added."""
        self._held[request] = None
        self.num_tokens += request.num_prompt_tokens

    def add(self, request: Request) -> None:
        """Queues a request, which keeps its place by `queue_key`."""
        request.queue_key = self._policy.key(request)
        insort(self._entries, (request.queue_key, request.number, request))
        self.num_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        if request in self._held:
            del self._held[request]
            self.num_tokens -= request.num_prompt_tokens
            return
        index = bisect_left(self._entries, (request.queue_key, request.number))
        if index == len(self._entries) or self._entries[index][2] is not request:
            raise KeyError(request.request_id)
        del self._entries[index]
        self.num_tokens -= request.num_prompt_tokens
