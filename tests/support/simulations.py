"""Workloads and fleets of simulated engines for tests."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable
from typing import Any

from quire.engine_core.simulation.fleet import Fleet
from quire.protocol.engine_shape import EngineShape
from quire.protocol.simulation import (
    ClientTime,
    SimulatedRequest,
    SimulatedResult,
    SimulationEnd,
    SimulationSample,
    SimulationSetup,
    StepTime,
)

BLOCK = 64
STEP_TIME = StepTime(0.01, 1e-4, 5e-4, 1e-7, 1e-9, 2e-9)


def shape(**changes: Any) -> EngineShape:
    """Return the shape of a small engine."""
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 32,
        "num_pages": 2000,
    }
    return EngineShape(**(sizes | changes))


def setup(num_engines: int = 1, router: str = "least-loaded", **changes: Any) -> SimulationSetup:
    """Return a setup; `changes` are of the shape, of the setup's fields that have defaults, and `client`."""
    names = {"seed", "tells_lengths", "sample_seconds", "concurrency", "speculative_config", "fetch"} & changes.keys()
    own = {name: changes.pop(name) for name in names}
    client = changes.pop("client", ClientTime())
    return SimulationSetup(shape(**changes), STEP_TIME, client, num_engines, router, **own)


def request(
    index: int, arrival: float, prompt: int, output: int, blocks: Iterable[int], **more: Any
) -> SimulatedRequest:
    """Return a request whose prompt has blocks of `BLOCK` tokens."""
    return SimulatedRequest(index, arrival, prompt, output, list(blocks), BLOCK, **more)


def chats(count: int, seed: int = 0, rate: float = 20.0, sessions: int = 0) -> list[SimulatedRequest]:
    """Return requests of which most share a prefix with an earlier one; some are turns of `sessions`."""
    random_ = random.Random(seed)
    requests: list[SimulatedRequest] = []
    fresh, arrival = 1000, 0.0
    for index in range(count):
        before = random_.choice(requests).blocks if requests and random_.random() < 0.6 else []
        more = random_.randint(1, 4)
        blocks = [*before[: random_.randint(0, 12)], *range(fresh, fresh + more)]
        fresh += more
        arrival += random_.expovariate(rate)
        prompt = len(blocks) * BLOCK - random_.choice([0, 1, 13, 63])
        session = f"s{random_.randrange(sessions)}" if sessions and random_.random() < 0.7 else None
        delay = random_.choice([0.0, 0.5]) if session else 0.0
        requests.append(request(index, arrival, prompt, random_.randint(1, 90), blocks, session=session, delay=delay))
    return requests


def crowd(count: int, rate: float = 15.0) -> list[SimulatedRequest]:
    """Return requests of which twelve after one another have the same long prompt, more than an engine can answer."""
    fresh = itertools.count(100_000)
    return [
        request(index, index / rate, 20 * BLOCK + 16, 40, [*range(100 * (index // 12), 100 * (index // 12) + 20), new])
        for index, new in zip(range(count), fresh, strict=False)
    ]


class FleetRun:
    """A run of a fleet with all its outputs."""

    def __init__(
        self, setup: SimulationSetup, requests: Iterable[SimulatedRequest], *, is_stepwise: bool = False
    ) -> None:
        self.results: list[SimulatedResult] = []
        self.samples: list[SimulationSample] = []
        self.fleet = Fleet(setup, self._take, is_stepwise=is_stepwise)
        self.end: SimulationEnd = self.fleet.run(requests)
        self.results.sort(key=lambda result: result.index)

    def _take(self, output: SimulatedResult | SimulationSample) -> None:
        if isinstance(output, SimulatedResult):
            self.results.append(output)
        else:
            self.samples.append(output)

    @property
    def engines(self) -> list[int]:
        """Engine of each request."""
        return [result.engine for result in self.results]


def times_of(result: SimulatedResult) -> list[float]:
    """Return the times of the tokens."""
    return array("d", result.token_times).tolist()
