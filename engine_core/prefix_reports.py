"""Reports of the prefix cache to the clients that watch it: routers, which send a request to where its prefix is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine_core.feature import Feature
from quire.kernels.runner import PrefixWatch, Sequences
from quire.protocol.messages import MAX_WATCHED_SALTS, ClientMessage, PrefixReport, WatchPrefixes

MAX_WATCHERS = 16
"""Clients that may watch the prefix cache at once."""

_MOST_PAGES, _MOST_TOKENS = 512, 8192  # of a report: they take less than a millisecond


@dataclass(eq=False)
class _Watcher:
    """A client's watch. `untold` has the salts of which no report has told yet, by the numbers of their roots."""

    watch: PrefixWatch
    salts: set[str] = field(default_factory=set)
    untold: dict[int, str] = field(default_factory=dict)

    def add(self, salts: Sequence[str]) -> None:
        """Watch further salts. Raises ValueError, and adds none, if they are too many."""
        new = [salt for salt in dict.fromkeys(salts) if salt not in self.salts]
        if len(self.salts) + len(new) > MAX_WATCHED_SALTS:
            raise ValueError(
                f"this client watches {len(self.salts)} salts, and with {len(new)} more they would be above "
                f"{MAX_WATCHED_SALTS}; none of these was added, send fewer"
            )
        self.salts.update(new)
        self.untold.update(zip(self.watch.add_salts(new), new, strict=True))

    def next_report(self, most: int) -> PrefixReport:
        """Return the next report, of so many pages at most."""
        removed, stored = self.watch.take(most)
        report = PrefixReport(removed=removed)
        for parent, root, _, keys, tokens in stored:
            if root in self.untold:
                report.roots.append((root, self.untold.pop(root)))
            report.stored.append((root if parent is None else parent, keys, tokens))
        return report


class PrefixReporter(Feature):
    """Sends each client that watches prefixes what has changed below its salts.

    A report has a bounded number of pages, and the next one comes when it has left. So a client that does not read
    holds nobody up: the cache notes what it has yet to be told, and what comes and goes meanwhile it never learns of.
    """

    def __init__(self, sequences: Sequences, block_size: int, send: Callable[[bytes, PrefixReport], None]) -> None:
        """`block_size`: tokens of a page."""
        self._tree = sequences.tree
        self._send = send
        self._most = max(1, min(_MOST_PAGES, _MOST_TOKENS // block_size))
        self._watchers: dict[bytes, _Watcher] = {}
        self._unsent: set[bytes] = set()  # clients to whom a report has not left yet; any thread

    def receive(self, client_id: bytes, message: ClientMessage) -> bool:
        """Take a WatchPrefixes, or answer it with a refusal."""
        if not isinstance(message, WatchPrefixes):
            return False
        try:
            self._watch(client_id, message.salts)
        except ValueError as error:
            self._send(client_id, PrefixReport(refusal=str(error)))
        return True

    def _watch(self, client_id: bytes, salts: Sequence[str]) -> None:
        """Add salts to those that a client watches. Raises ValueError if it may not."""
        watcher = self._watchers.get(client_id)
        if watcher is None:
            if len(self._watchers) >= MAX_WATCHERS:
                raise ValueError(
                    f"{MAX_WATCHERS} clients watch the prefix cache of this engine, and no more may; end one of them "
                    "first"
                )
            watcher = self._watchers[client_id] = _Watcher(self._tree.watch_salts())
        watcher.add(salts)

    def update(self) -> None:
        """Send the next report to each client for which there is one, and whose last one has left."""
        for client_id, watcher in self._watchers.items():
            if watcher.watch.has_changes and client_id not in self._unsent:
                self._unsent.add(client_id)
                self._send(client_id, watcher.next_report(self._most))

    def report_sent(self, client_id: bytes) -> None:
        """See Feature."""
        self._unsent.discard(client_id)

    def forget(self, client_id: bytes) -> None:
        """Drop the watch of a client that has left."""
        self._watchers.pop(client_id, None)
        self._unsent.discard(client_id)

    def stats(self) -> dict[str, float]:
        """See Feature."""
        return {"prefix_watchers": len(self._watchers)}
