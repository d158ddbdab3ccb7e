"""What whole batches take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, Sample
from quire.frontend.evaluation.replay.runs import Runs
from quire.frontend.evaluation.workload.request import WorkloadRequest

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass
class _Batch:
    """Collects a run of one batch. `seconds`: until its last request had ended."""

    seconds: float = 0.0
    error: str | None = None

    def add(self, record: RequestRecord) -> None:
        self.seconds = max(self.seconds, record.ended)
        if record.outcome is not Outcome.COMPLETED:
            self.error = f"a request of the batch is {record.outcome}: {record.error}"

    def sample(self, sample: Sample) -> None:
        """How the target is meanwhile is not asked for."""

    def end(self, seconds: float, interrupted: str | None = None, *, stolen: float | None = None) -> None:
        """The last request tells the time: more than that is spent on ending a run."""

    def check(self) -> None:
        """Raise RuntimeError if a request has not completed."""
        if self.error is not None:
            raise RuntimeError(self.error)


@dataclass
class Latencies:
    """Seconds of each batch so far; `interrupted` says what ended the measurement before its time."""

    seconds: list[float] = field(default_factory=list)
    interrupted: str | None = None

    def report(self) -> dict[str, Any]:
        """With the fields of `vllm bench latency --output-json`, in seconds. Raises ValueError if there are none."""
        if not self.seconds:
            raise ValueError("no batch has been measured to its end")
        percentiles = np.percentile(self.seconds, PERCENTILES).tolist()
        return {
            "avg_latency": float(np.mean(self.seconds)),
            "latencies": self.seconds,
            "percentiles": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
        }


async def measure_latency(
    runs: Runs, requests: Sequence[WorkloadRequest], batch_size: int, num_warmup: int, found: Latencies, seed: int = 0
) -> str | None:
    """Send the requests in batches, each when the one before has ended, and put into `found` what each batch took.

    The first `num_warmup` batches are not counted. Returns what has ended this before its time, if anything did.
    Raises RuntimeError when a request of a batch does not complete.
    """
    try:
        for begin in range(0, len(requests), batch_size):
            batch = _Batch()
            found.interrupted = await runs.replay(batch, requests[begin : begin + batch_size], Load(), seed=seed)
            if found.interrupted is not None:
                break
            batch.check()
            if begin >= num_warmup * batch_size:
                found.seconds.append(batch.seconds)
    except Exception as error:
        found.interrupted = str(error)
        raise
    return found.interrupted
