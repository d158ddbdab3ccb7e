"""Parallel samples (`n`, `best_of`): requests of one client that share a prompt, which is computed once.

The frontend sends one request for each sample, so each decodes as a single sequence. What they have in common is the
shared-prompt group: a member that starts forks from a running member that has computed the prompt, and takes over all
its pages, also the last one, which the prompt does not fill and which the prefix cache cannot hold. When the last
running member ends, a waiting one takes its place at once: the successor.
"""

from __future__ import annotations

from quire.engine_core.request import Request, RequestStatus


class SharedPromptGroup:
    """Members of a group that have not ended. Running ones are in order of start: the first has computed most."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Request, None] = {}
        self.running: dict[Request, None] = {}


class ParallelSamples:
    """Shared-prompt groups by their members. Requests that share no prompt are in none, and cost nothing."""

    def __init__(self) -> None:
        self._groups: dict[Request, SharedPromptGroup] = {}

    def join(self, request: Request, member: Request) -> None:
        """Add a new request to the group of another one, which may have been alone so far."""
        group = self._groups.get(member)
        if group is None:
            group = self._groups[member] = SharedPromptGroup()
            if member.status is RequestStatus.RUNNING:
                group.running[member] = None
            elif (
                member.status is not RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            ):  # it enters when it may start
                group.waiting[member] = None
        self._groups[request] = group

    def waits(self, request: Request) -> None:
        """Note that a request waits from now on, and could start."""
        if (group := self._groups.get(request)) is not None:
            group.running.pop(request, None)
            group.waiting[request] = None

    def runs(self, request: Request) -> None:
        """Note that a request runs from now on."""
        if (group := self._groups.get(request)) is not None:
            group.waiting.pop(request, None)
            group.running[request] = None

    def leave(self, request: Request) -> Request | None:
        """Forget a request that ends; return its successor, if only its pages hold the prompt for waiting members."""
        group = self._groups.pop(request, None)
        if group is None:
            return None
        group.waiting.pop(request, None)
        was_running = request in group.running
        group.running.pop(request, None)
        if not was_running or group.running:
            return None
        return next((member for member in group.waiting if can_fork(member, request)), None)

    def source_of(self, request: Request) -> Request | None:
        """Return the running member that has computed most of the prompt; None if a request must compute it itself."""
        group = self._groups.get(request)
        return None if group is None or request.needs_every_token else next(iter(group.running), None)


def num_shared_tokens(request: Request) -> int:
    """Return the prompt positions that a request can take over from another member: one token is left to compute."""
    return min(request.num_prompt_tokens, request.num_tokens - 1)


def can_fork(request: Request, source: Request) -> bool:
    """Return True if `source`, of the same group, has computed all that the request can take over."""
    return 0 < num_shared_tokens(request) <= source.num_computed_tokens and not request.needs_every_token
