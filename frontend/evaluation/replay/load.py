"""How a workload is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Open loop, at the workload's own times, unless `concurrency` is given.

    `concurrency`: a closed loop of so many users instead. Each sends the next request of the workload as soon as it has
    the answer to the one before, whatever the workload's times are; that moment is the request's arrival. A user whose
    request waits for an earlier turn of its session waits with it.

    `max_concurrency`: the open loop has at most so many requests under way, as with vLLM's flag of that name. A request
    that waits for room is sent too late: the wait counts as lag, not as its TTFT, and as the workload was not served at
    its own times, such a run soon is invalid.

    `request_timeout`: seconds from the sending of a request after which it is ended, and late. `warm_up`: so many
    requests of the workload's beginning are sent before the clock starts, with other tokens, and in no figure.
    """

    concurrency: int | None = None
    max_concurrency: int | None = None
    request_timeout: float | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.max_concurrency is not None:
            raise ValueError("concurrency asks for a closed loop, max_concurrency for an open one; give one of them")
