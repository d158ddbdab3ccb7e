"""Simulation of one engine, observed in each of its steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from quire.engine_core.scheduling.policies import WINDOW, LongestPrefixMatch
from quire.engine_core.simulation.engine import EngineTiming, SimulatedAnswer, SimulatedEngine
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EventType, FinishReason
from quire.protocol.simulation import SimulatedRequest, StepTime


class Simulation:
    """One run of an engine that does not know the lengths of answers. Requests are in order of arrival."""

    def __init__(self, limits: EngineShape, step_time: StepTime) -> None:
        self.limits = limits
        self.engine = SimulatedEngine(
            limits, EngineTiming(step_time), tells_lengths=False, is_stepwise=True, on_end=self._end
        )
        self.answers: list[SimulatedAnswer] = []
        self.most_passed_over = 0  # by what lpm counts
        self._steps = array("d"), array("d"), array("d"), array("d")  # seconds, running, waiting, held pages

    def run(self, requests: Sequence[WorkloadRequest]) -> None:
        """Serve all requests."""
        for index, request in enumerate(requests):
            self.engine.send(_simulated(index, request), request.arrival, request.arrival)
        while self.engine.next_step < math.inf:
            self._step()
        self.answers.sort(key=lambda answer: answer.request.index)

    def _step(self) -> None:
        began = self.engine.next_step
        self.engine.step()
        scheduler = self.engine.core.scheduler
        state = len(scheduler.running), len(scheduler.waiting), self.engine.core.sequences.held_pages
        for column, value in zip(self._steps, (self.engine.clock.now - began, *state), strict=True):
            column.append(value)
        if isinstance(policy := scheduler.waiting.policy, LongestPrefixMatch):
            passed_over = (policy.times_passed_over[request] for request in islice(scheduler.waiting, WINDOW))
            self.most_passed_over = max(self.most_passed_over, max(passed_over, default=0))

    def _end(self, answer: SimulatedAnswer) -> None:
        self.answers.append(answer)

    def times_overtaken(self) -> list[int]:
        """Return, for each request, the steps in which a later one started while it waited; from the events alone."""
        latest: dict[float, int] = {}  # the last of the requests that started at this time
        for number, answer in enumerate(self.answers):
            for _, started in waits(answer):
                latest[started] = number
        times = np.array(sorted(latest))
        numbers = np.array([latest[time] for time in times])
        return [
            sum(
                int((numbers[np.searchsorted(times, queued) : np.searchsorted(times, started)] > number).sum())
                for queued, started in waits(answer)
            )
            for number, answer in enumerate(self.answers)
        ]

    def report(self) -> dict[str, Any]:
        """Return all figures of the run, from the first step to the last; seconds are virtual."""
        stats, counters = self.engine.core.stats, self.engine.core.scheduler.counters
        served = [answer for answer in self.answers if answer.finish_reason is FinishReason.STOP]
        gaps = np.concatenate([np.diff(answer.token_times) for answer in served] or [np.zeros(0)])
        seconds, running, waiting, held = (np.array(column) for column in self._steps)
        busy = seconds.sum()
        return {
            "policy": self.limits.scheduling_policy,
            "pages": self.limits.num_pages,
            "block_size": self.limits.block_size,
            "requests": len(self.answers),
            "served": len(served),
            "seconds": self.engine.clock.now,
            "busy_seconds": busy,
            "steps": len(seconds),
            "prompt_tokens": counters.prompt_tokens,
            "cached_tokens": counters.cached_tokens,
            "hit_rate": counters.cached_tokens / max(counters.prompt_tokens, 1),
            "output_tokens": self.engine.num_output_tokens,
            "preemptions": stats.preemptions,
            "wasted_tokens": stats.wasted_tokens,
            "evictions": stats.evictions,
            "most_passed_over": self.most_passed_over,
            "most_overtaken": max(self.times_overtaken(), default=0),
            "running_mean": (running * seconds).sum() / busy,
            "waiting_mean": (waiting * seconds).sum() / busy,
            "waiting_most": waiting.max(),
            "held_mean": (held * seconds).sum() / busy / self.limits.num_pages,
            "ttft_seconds": percentiles([first_token_seconds(answer) for answer in served]),
            "itl_seconds": percentiles(gaps),
        }


def waits(answer: SimulatedAnswer) -> list[tuple[float, float]]:
    """Return the begin and end of each of the request's waits in the queue."""
    found, queued = [], 0.0
    for event in answer.events:
        if event.type is EventType.SCHEDULED:
            found.append((queued, event.timestamp))
        else:
            queued = event.timestamp
    return found


def first_token_seconds(answer: SimulatedAnswer) -> float:
    """Return the seconds from the arrival to the first token."""
    return answer.token_times[0] - answer.sent


def _simulated(index: int, request: WorkloadRequest) -> SimulatedRequest:
    blocks, size = list(request.blocks), request.block_tokens
    return SimulatedRequest(index, request.arrival, request.prompt_tokens, request.output_tokens, blocks, size)


def percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum; 0 where there are no values."""
    found = np.percentile(values, [50, 99, 100]).tolist() if len(values) else [0.0] * 3
    return dict(zip(("p50", "p99", "most"), found, strict=True))
