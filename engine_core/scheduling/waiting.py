"""The queue of waiting requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.engine_core.request import Request
from quire.engine_core.scheduling.policies import Policy


class WaitingQueue:
    """Requests in the order of their policy's keys, and then of their arrival.

    Some are held back, as they can't start yet whatever their place; they count as waiting.
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
        """True if one of them can start."""
        return bool(self._entries)

    def ready(self) -> Iterator[Request]:
        """Return the requests that can start, in order."""
        return (request for _, _, request in self._entries)

    def hold(self, request: Request) -> None:
        """Queue a request that can't start until it is removed and added."""
        self._held[request] = None
        self.num_tokens += request.num_prompt_tokens

    def add(self, request: Request) -> None:
        """Queue a request by its `queue_key`."""
        request.queue_key = self._policy.key(request)
        insort(self._entries, (request.queue_key, request.number, request))
        self.num_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        """Remove a request, held back or not; KeyError if it is not here."""
        if request in self._held:
            del self._held[request]
            self.num_tokens -= request.num_prompt_tokens
            return
        index = bisect_left(self._entries, (request.queue_key, request.number))
        if index == len(self._entries) or self._entries[index][2] is not request:
            raise KeyError(request.request_id)
        del self._entries[index]
        self.num_tokens -= request.num_prompt_tokens
