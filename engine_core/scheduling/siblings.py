"""Requests of one client with the same prompt, which is computed once: the others fork from one that has done so."""

from __future__ import annotations

from quire.engine_core.request import Request, RequestStatus


class Siblings:
    """Where the members of one family stand; those that have ended are forgotten."""

    def __init__(self) -> None:
        self.waiting: dict[Request, None] = {}
        self.running: dict[Request, None] = {}  # in the order in which they started: the first has computed most

    @classmethod
    def of(cls, first: Request) -> Siblings:
        """The family of a request that has been alone so far."""
        family = cls()
        if first.status is RequestStatus.RUNNING:
            family.running[first] = None
        elif first.status is not RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:  # it enters when it may start
            family.waiting[first] = None
        return family

    def source_of(self, request: Request) -> Request | None:
        """Who computes the prompt for `request`, or has done so."""
        if request.needs_every_token:
            return None
        return next(iter(self.running), None)

    def heir_of(self, request: Request) -> Request | None:
        """Who is to take over the pages of `request`, which ends: the first that waits, if nobody else has them."""
        if self.running:
            return None
        return next((heir for heir in self.waiting if request.has_computed_for(heir)), None)
