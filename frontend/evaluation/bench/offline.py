"""Offline benchmarks: the latency of batches, and the throughput of requests that all arrive at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, TargetSample
from quire.frontend.evaluation.replay.runner import Runs
from quire.frontend.evaluation.workload.request import WorkloadRequest

PERCENTILES = (10, 25, 50, 75, 90, 99)

_MAX_WAITING = 4096  # requests that an engine queues by default


@dataclass
class _Batch:
    """Collector of a run of one batch. `seconds` is the end of its last request."""

    seconds: float = 0.0
    error: str | None = None

    def add(self, record: RequestRecord) -> None:
        self.seconds = max(self.seconds, record.ended)
        if record.outcome is not Outcome.COMPLETED:
            self.error = f"a request of the batch is {record.outcome}: {record.error}"

    def sample(self, sample: TargetSample) -> None:
        """Ignore the state of the target."""

    def end(self, seconds: float, interrupted: str | None = None, *, steal: float | None = None) -> None:
        """Ignore the end of the run, which comes later than that of the last request."""

    def check(self) -> None:
        """Raise RuntimeError if a request has not completed."""
        if self.error is not None:
            raise RuntimeError(self.error)


@dataclass
class Latencies:
    """Seconds of each batch so far; `interrupted` says what ended the measurement early."""

    seconds: list[float] = field(default_factory=list)
    interrupted: str | None = None

    def report(self) -> dict[str, Any]:
        """Return the fields of `vllm bench latency --output-json`. Raises ValueError if there are no batches."""
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
    """Send the requests in batches, each when the previous one has ended, and append their seconds to `found`.

    The first `num_warmup` batches are not counted. Returns what interrupted the measurement, or None. Raises
    RuntimeError when a request of a batch does not complete.
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


def everything_at_once(warm_up: int = 0) -> Load:
    """Return a load of all requests at the beginning, at most as many in flight as an engine queues by default."""
    return Load(concurrency=_MAX_WAITING, warm_up=warm_up)


def throughput_fields(report: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `vllm bench throughput --output-json`, and output tokens a second, from a run's report."""
    tokens = report["total_input_tokens"] + report["total_output_tokens"]
    return {
        "elapsed_time": report["duration"],
        "num_requests": report["completed"],
        "total_num_tokens": tokens,
        "requests_per_second": report["request_throughput"],
        "tokens_per_second": report["total_token_throughput"],
        "output_tokens_per_second": report["output_throughput"],
    }
