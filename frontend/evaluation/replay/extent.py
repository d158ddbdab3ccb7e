"""How long a workload is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Extent:
    """As far as is known: at most so many requests, of which the last arrives after at most so many seconds.

    None: that is not known. Nothing but what a run shows while it goes on depends on it.
    """

    requests: int | None = None
    seconds: float | None = None

    def share(self, ended: int, elapsed: float | None) -> float | None:
        """How much is over when so many requests have ended; None where that is not known.

        `elapsed`: seconds since the run began, None where the workload's times do not matter.
        """
        shares = []
        if self.requests:
            shares.append(ended / self.requests)
        if self.seconds and elapsed is not None:
            shares.append(elapsed / self.seconds)
        return min([*shares, 1.0]) if shares else None
