"""The most important first, and in the end everybody."""

from __future__ import annotations

from quire.engine_core.request import Request
from quire.engine_core.scheduling.policies.base import Policy

AGING_SECONDS = 10.0
"""Who has waited so long counts as more important by one."""


class Priority(Policy):
    """The least `priority` first. Waiting makes up for a lack of importance, so nobody waits for ever."""

    def key(self, request: Request) -> float:
        """All age alike, so the order of two of them never changes."""
        return request.arrival + AGING_SECONDS * request.priority
