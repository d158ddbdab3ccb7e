"""Parallel samples (`n`, `best_of`): requests of one client that share a prompt, which is computed once.

The frontend sends one request for each sample, so each decodes as a single sequence. What they have in common is the
shared-prompt group: a member that starts forks from a running member that has computed the prompt, and takes over all
its pages, also the last one, which the prompt does not fill and which the prefix cache cannot hold. When the last
running member ends, a waiting one takes its place at once: the successor.
"""

from __future__ import annotations

from quire.engine_core.decoding.single import SingleSequence
from quire.engine_core.request import Request, RequestStatus
from quire.protocol.engine_shape import EngineShape


class SharedPromptGroup:
    """Members of a group that have not ended. Running ones are in order of start: the first has computed most."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Request, None] = {}  # those that could start
        self.running: dict[Request, None] = {}


class ParallelSample(SingleSequence):
    """One sample of a prompt that others are taken from too."""

    __slots__ = ("group",)

    def __init__(self, single: SingleSequence, limits: EngineShape, group: SharedPromptGroup) -> None:
        """Go on with what has been a single sequence so far."""
        self._limits = limits
        self.num_accepted_drafts, self.num_rejected_drafts = single.num_accepted_drafts, single.num_rejected_drafts
        self.group = group

    def queue(self, request: Request) -> None:
        """Wait for a member that has computed the prompt, or for a start of its own."""
        self.group.running.pop(request, None)
        self.group.waiting[request] = None

    def begin(self, request: Request) -> None:
        """Run from now on, as a source for those that wait."""
        self.group.waiting.pop(request, None)
        self.group.running[request] = None

    def source(self, request: Request) -> Request | None:
        """Return the running member that has computed most of the prompt."""
        return None if request.needs_every_token else next(iter(self.group.running), None)

    def leave(self, request: Request) -> Request | None:
        """Return the successor, if only this request's pages hold the prompt for waiting members."""
        group = self.group
        was_running = request in group.running
        group.waiting.pop(request, None)
        group.running.pop(request, None)
        if not was_running or group.running:
            return None
        return next((member for member in group.waiting if member.can_fork_from(request)), None)


def share_prompt(request: Request, other: Request, limits: EngineShape) -> None:
    """Make parallel samples of a new request and another of the same prompt, if each of them is one sequence."""
    if not (isinstance(request.decoding, SingleSequence) and isinstance(other.decoding, SingleSequence)):
        return
    if not isinstance(other.decoding, ParallelSample):
        group = SharedPromptGroup()
        other.decoding = ParallelSample(other.decoding, limits, group)
        if other.status is RequestStatus.RUNNING:
            group.running[other] = None
        elif other.status not in (
            RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
            RequestStatus.WAITING_FOR_ADAPTER,
        ):
            group.waiting[other] = None
    request.decoding = ParallelSample(request.decoding, limits, other.decoding.group)
