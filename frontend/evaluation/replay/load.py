"""Load of a run: how a workload is sent, and how long it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """An open loop at the workload's own times, unless `concurrency` is given.

    `concurrency` makes it a closed loop of this many users: each sends the next request of the workload as soon as its
    previous one is answered, whatever the workload's times are; that moment is the request's arrival. A user whose
    request waits for an earlier turn of its session waits with it.

    `max_concurrency` limits the requests in flight of an open loop, as vLLM's flag of that name. A request that waits
    for a free place is sent too late: the wait counts as lag, not as its TTFT, and such a run soon is invalid, as the
    workload was not served at its own times.

    A request is ended as late `request_timeout` seconds after it was sent. The first `warm_up` requests of the workload
    are sent before the clock starts, with other tokens, and count in no figure.
    """

    concurrency: int | None = None
    max_concurrency: int | None = None
    request_timeout: float | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.max_concurrency is not None:
            raise ValueError("concurrency asks for a closed loop, max_concurrency for an open one; give one of them")


@dataclass
class Extent:
    """Upper limits on a workload's requests and on the arrival of its last one, in seconds; None if unknown.

    Only the display of a run's progress depends on them.
    """

    requests: int | None = None
    seconds: float | None = None

    def share(self, ended: int, elapsed: float | None) -> float | None:
        """Return the share of the workload that is over after `ended` requests; None if unknown.

        `elapsed`: seconds since the run began, None where the workload's times do not matter.
        """
        shares = []
        if self.requests:
            shares.append(ended / self.requests)
        if self.seconds and elapsed is not None:
            shares.append(elapsed / self.seconds)
        return min([*shares, 1.0]) if shares else None
