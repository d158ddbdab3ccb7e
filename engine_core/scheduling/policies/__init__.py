"""Who of those that wait comes next: the policies, one file each, by the names of `--scheduling-policy`."""

from __future__ import annotations

from quire.engine_core.scheduling.policies.base import Policy
from quire.engine_core.scheduling.policies.fcfs import FirstComeFirstServed
from quire.engine_core.scheduling.policies.lpm import LongestPrefixMatch
from quire.engine_core.scheduling.policies.priority import Priority
from quire.engine_core.scheduling.policies.sjf import ShortestJobFirst

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "lpm": LongestPrefixMatch,
    "sjf": ShortestJobFirst,
}
