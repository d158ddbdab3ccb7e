"""Arrival times in place of a trace's own: endless iterators of seconds, determined by a seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from msgspec.structs import replace

from quire.frontend.evaluation.workload.request import WorkloadRequest

Strategy = Literal["linear", "exponential"]

_SAMPLES_AT_ONCE = 1024


def arrive(requests: Iterable[WorkloadRequest], times: Iterable[float]) -> Iterator[WorkloadRequest]:
    """Yield each request with its arrival time replaced."""
    for request, time in zip(requests, times, strict=False):
        yield replace(request, arrival=time)


def at_rate(rate: float, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Return the times of `rate` requests a second; all are 0 if it is infinite.

    `burstiness` is vLLM's: the shape of the gamma distribution of the gaps. 1 is a Poisson process, less is burstier,
    more is more even, and infinite is constant. Raises ValueError unless both are above 0.
    """
    _check_rate("rate", rate)
    if math.isinf(rate):
        return itertools.repeat(0.0)
    return itertools.accumulate(gap / rate for gap in _gaps(burstiness, seed))


def ramp(
    start_rate: float,
    end_rate: float,
    num_requests: int,
    strategy: Strategy = "linear",
    burstiness: float = 1.0,
    seed: int = 0,
) -> Iterator[float]:
    """Return times whose rate grows from `start_rate` to `end_rate` over `num_requests`, as vLLM's --ramp-up-strategy.

    The rate grows with each request, by the same amount or by the same factor, and then stays at `end_rate`. Raises
    ValueError for rates that are not above 0 and finite, and for less than 1 request.
    """
    for name, rate in (("start_rate", start_rate), ("end_rate", end_rate)):
        _check_rate(name, rate)
        if math.isinf(rate):
            raise ValueError(f"{name}={rate} is out of range; it must be finite")
    if num_requests < 1:
        raise ValueError(f"num_requests={num_requests} is out of range; it must be at least 1")
    if strategy not in ("linear", "exponential"):
        raise ValueError(f"strategy={strategy!r} is unknown; it can be linear or exponential")

    def rate_of(number: int) -> float:
        progress = min(number / max(num_requests - 1, 1), 1.0)
        if strategy == "linear":
            return start_rate + (end_rate - start_rate) * progress
        return float(start_rate * (end_rate / start_rate) ** progress)

    return itertools.accumulate(gap / rate_of(number) for number, gap in enumerate(_gaps(burstiness, seed)))


def _gaps(burstiness: float, seed: int) -> Iterator[float]:
    """Return gaps of mean 1."""
    if not burstiness > 0:
        raise ValueError(f"burstiness={burstiness} is out of range; it must be above 0, and 1 is a Poisson process")
    return itertools.repeat(1.0) if math.isinf(burstiness) else _gamma_gaps(burstiness, seed)


def _gamma_gaps(burstiness: float, seed: int) -> Iterator[float]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.gamma(burstiness, 1 / burstiness, _SAMPLES_AT_ONCE).tolist()


def _check_rate(name: str, rate: float) -> None:
    if not rate > 0:
        raise ValueError(f"{name}={rate} is out of range; it must be above 0 requests a second")
