"""Cost of a long prompt for decoding requests, and for a short prompt right after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench.simulation import Simulation, first_token_seconds, percentiles

from quire.engine_core.simulation.engine import SimulatedAnswer
from quire.frontend.evaluation.workload.blocks import blocks_for
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.engine_shape import EngineShape
from quire.protocol.simulation import StepTime, StepWork

_CHAT_TOKENS = 100  # of a chat's prompt
_SHORT_OUTPUT = 10


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """A load of `chats` decoding requests, a prompt of `long_tokens`, and in the next step one of `short_tokens`."""

    chats: int = 16
    long_tokens: int = 8000
    short_tokens: int = 32

    def run(self, limits: EngineShape, step_time: StepTime) -> dict[str, Any]:
        """Return the chats' inter-token latency without and with the long prompt, and the TTFT of the short one."""
        alone = step_time.seconds(StepWork(0, self.chats, 0, 0))
        arrival = 200 * alone
        requests = [self._request(number, 0.0, _CHAT_TOKENS, self.chat_output) for number in range(self.chats)]
        requests.append(self._request(self.chats, arrival, self.long_tokens, _SHORT_OUTPUT))
        requests.append(self._request(self.chats + 1, arrival + alone, self.short_tokens, _SHORT_OUTPUT))
        simulation = Simulation(limits, step_time)
        simulation.run(requests)
        *chats, long, short = simulation.answers
        before = _gaps(chats, arrival / 2, arrival)
        mixed = _gaps(chats, arrival, long.token_times[0])
        steps = chats[0].token_times
        return {
            "itl_alone_seconds": percentiles(before),
            "itl_mixed_seconds": percentiles(mixed),
            "itl_growth_p99": float(np.percentile(mixed, 99) / np.percentile(before, 99)),
            "long_ttft_seconds": first_token_seconds(long),
            "short_ttft_seconds": first_token_seconds(short),
            "short_ttft_steps": sum(short.sent < time <= short.token_times[0] for time in steps),
            "short_ttft_chunk_times": first_token_seconds(short) / float(np.mean(mixed)),
        }

    @property
    def chat_output(self) -> int:
        """Tokens of a chat's answer: more than it gets until the long prompt is done in tiles of at least 32."""
        return 400 + self.long_tokens // 16

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.long_tokens + _SHORT_OUTPUT, _CHAT_TOKENS + self.chat_output)

    def _request(self, number: int, arrival: float, prompt: int, output: int) -> WorkloadRequest:
        first = number * blocks_for(self.long_tokens + _CHAT_TOKENS)
        return WorkloadRequest(arrival, prompt, output, tuple(range(first, first + blocks_for(prompt))))


def _gaps(answers: Iterable[SimulatedAnswer], since: float, until: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the inter-token latencies of tokens that arrived in this interval."""
    gaps = []
    for answer in answers:
        times = np.array(answer.token_times)
        ends = times[1:]
        gaps.append(np.diff(times)[(ends > since) & (ends <= until)])
    return np.concatenate(gaps)
