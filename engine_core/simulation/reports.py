"""Reports of simulated engines to a router, like those of real ones: their steps and changes of their prefix caches."""

from __future__ import annotations

from typing import NamedTuple

from quire.kernels.runner import Sequences
from quire.protocol.messages import PrefixReport, SchedulerStats

_ALL = 1 << 30  # pages
_ROOT = 0  # number of the empty prefix, which has no key

FIRST_REPORT = PrefixReport(roots=[(_ROOT, "")])
"""The report of an engine that begins with an empty cache."""


class EngineReport(NamedTuple):
    """Statistics of a step that has ended at `time`, and what has changed in the prefix cache since the last report."""

    time: float
    stats: SchedulerStats
    prefixes: PrefixReport


class CacheWatch:
    """Notes the changes of a prefix cache that is empty. There are no salts in a simulation."""

    def __init__(self, sequences: Sequences) -> None:
        self._watch = sequences.tree.watch()

    def take(self) -> PrefixReport:
        """Return what has changed since the last call."""
        removed, stored = self._watch.take(_ALL)
        runs = [(_ROOT if parent is None else parent, keys, tokens) for parent, _, _, keys, tokens in stored]
        return PrefixReport(removed=removed, stored=runs)
