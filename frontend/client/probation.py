"""The trial of requests that may have killed the engine.

A request that was in the engine at two of its deaths, and has hardly grown between them, is a suspect. Suspects are
tried in groups, while all other requests wait: a group has passed when each of its requests has ended or grown. When
the engine dies under a group, its halves are tried, down to a single request; one under which the engine dies with
nothing else to do is guilty. So an engine that is killed from outside delays nobody for long, and a request that kills
it ends alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from quire.frontend.client.observer import OpenRequest

_SUSPICIOUS_DEATHS = 2
_TOKENS_TO_PASS = 4  # by which a request must grow to be above suspicion


class Probation:
    """The suspects among a client's requests. Without any, every request is admitted."""

    def __init__(self) -> None:
        # Deaths of the engine with a request in it, and the tokens that it had at the last one.
        self._deaths: dict[OpenRequest, tuple[int, int]] = {}
        self._groups: deque[dict[OpenRequest, int]] = deque()  # with the tokens that each had; the first is on trial

    @property
    def is_active(self) -> bool:
        """True while there are suspects, and others wait."""
        return bool(self._groups)

    def admits(self, request: OpenRequest) -> bool:
        """Return True if the request may be in the engine now."""
        return not self._groups or request in self._groups[0]

    def accuse(self, running: Sequence[OpenRequest]) -> OpenRequest | None:
        """Note that the engine has died with these requests in it; return the one that is guilty, if that is clear."""
        for request in running:
            count, num_tokens = self._deaths.get(request, (0, 0))
            has_grown = request.num_output_tokens >= num_tokens + _TOKENS_TO_PASS
            self._deaths[request] = 1 if has_grown else count + 1, request.num_output_tokens
        if not self._groups:
            self._try([request for request in running if self._deaths[request][0] >= _SUSPICIOUS_DEATHS])
            return None
        group = list(self._groups.popleft())
        if len(group) == 1 and len(running) == 1:
            return group[0]
        self._try(group)
        return None

    def release(self, grown: Iterable[OpenRequest]) -> bool:
        """Let requests pass that have ended or grown enough; return True if others are admitted by that."""
        if not self._groups:
            return False
        group = self._groups[0]
        for request in grown:
            if request in group and (request.finished or request.num_output_tokens >= group[request] + _TOKENS_TO_PASS):
                del group[request]
        return self._drop_empty()

    def forget(self, requests: Iterable[OpenRequest]) -> bool:
        """Forget requests that have left; return True if others are admitted by that."""
        for request in requests:
            self._deaths.pop(request, None)
            for group in self._groups:
                group.pop(request, None)
        return self._drop_empty()

    def _try(self, suspects: Sequence[OpenRequest]) -> None:
        """Try these before all others: in two groups, if they are several."""
        middle = (len(suspects) + 1) // 2
        for half in (suspects[middle:], suspects[:middle]):
            if half:
                self._groups.appendleft({request: request.num_output_tokens for request in half})

    def _drop_empty(self) -> bool:
        before = len(self._groups)
        self._groups = deque(group for group in self._groups if group)
        return len(self._groups) < before
