"""First come, first served."""

from __future__ import annotations

from quire.engine_core.scheduling.policies.base import Policy


class FirstComeFirstServed(Policy):
    """In order of arrival. Who was preempted has come before those that still wait."""
