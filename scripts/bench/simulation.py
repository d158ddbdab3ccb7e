"""The real engine core and scheduler over a simulated executor, fed from a trace in virtual time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from bench.simulated import EOS, SimulatedExecutor, StepTime, VirtualClock

from quire.engine_core.engine import EngineCore
from quire.engine_core.limits import EngineLimits
from quire.engine_core.policies.base import WINDOW
from quire.frontend.workload.prompts import Prompts
from quire.frontend.workload.request import WorkloadRequest
from quire.protocol.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    EventType,
    FinishReason,
    SamplingParams,
)

_CLIENT = b"trace"


@dataclass(slots=True)
class Record:
    """What one request has seen; times in virtual seconds."""

    arrival: float
    output_tokens: int  # that it asked for
    token_times: array[float] = field(default_factory=lambda: array("d"))
    waits: list[tuple[float, float]] = field(default_factory=list)  # from the queue to the batch, each time
    queued: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def first_token_seconds(self) -> float:
        """From its arrival."""
        return self.token_times[0] - self.arrival

    def take(self, event: EventType, time: float) -> None:
        """Notes an event."""
        if event is EventType.SCHEDULED:
            self.waits.append((self.queued, time))
        else:
            self.queued = time


class Simulation:
    """One run of an engine. Requests are numbered in order of arrival, as the scheduler does it."""

    def __init__(self, limits: EngineLimits, step_time: StepTime) -> None:
        self.limits = limits
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(limits, step_time, self.clock)
        self.core = EngineCore(self.executor, limits, self._take, clock=self.clock)
        self.records: list[Record] = []
        self.most_passed_over = 0  # by what lpm counts
        self._prompts = Prompts(limits.vocab_size)
        self._steps = array("d"), array("d"), array("d"), array("d")  # seconds, running, waiting, held pages

    def run(self, requests: Sequence[WorkloadRequest]) -> None:
        """Serves them all, which are in order of arrival."""
        coming = iter(requests)
        request = next(coming, None)
        while request is not None or self.core.has_requests:
            while request is not None and request.arrival <= self.clock.now:
                self._add(request)
                request = next(coming, None)
            if self.core.has_requests:
                self._step()
            elif request is not None:
                self.clock.now = request.arrival
        self.core.flush()

    def _add(self, request: WorkloadRequest) -> None:
        params = SamplingParams(max_tokens=None, min_tokens=request.output_tokens, seed=0)
        name = str(len(self.records))
        self.records.append(Record(request.arrival, request.output_tokens))
        self.core.receive(_CLIENT, EngineCoreRequest(name, self._prompts.tokens(request), params, [EOS]))

    def _step(self) -> None:
        began = self.clock.now
        self.core.step()
        if self.clock.now == began and self.core.has_requests:
            raise RuntimeError(f"the scheduler leaves {len(self.core.scheduler.waiting)} requests waiting for nothing")
        scheduler = self.core.scheduler
        state = len(scheduler.running), len(scheduler.waiting), self.executor.sequences.held_pages
        for column, value in zip(self._steps, (self.clock.now - began, *state), strict=True):
            column.append(value)
        passed_over = (request.num_passed_over for request in islice(scheduler.waiting, WINDOW))
        self.most_passed_over = max(self.most_passed_over, max(passed_over, default=0))

    def _take(self, _client: bytes, message: EngineMessage) -> None:
        if not isinstance(message, EngineCoreOutputs):
            raise TypeError(f"the engine answered a request with {message}")
        for output in message.outputs:
            record = self.records[int(output.request_id)]
            if output.new_token_ids:
                record.token_times.append(message.timestamp)
            for event in output.events:
                record.take(event.type, event.timestamp)
            if output.finish_reason is not None:
                record.finish_reason = output.finish_reason

    def times_overtaken(self) -> list[int]:
        """For each request, the steps in which a later one started while it waited; from the events alone."""
        latest: dict[float, int] = {}  # who of those that started at this time came last
        for number, record in enumerate(self.records):
            for _, started in record.waits:
                latest[started] = number
        times = np.array(sorted(latest))
        numbers = np.array([latest[time] for time in times])
        return [
            sum(
                int((numbers[np.searchsorted(times, queued) : np.searchsorted(times, started)] > number).sum())
                for queued, started in record.waits
            )
            for number, record in enumerate(self.records)
        ]

    def report(self) -> dict[str, Any]:
        """All figures of the run, over the time from the first step to the last; seconds are virtual."""
        stats, counters = self.core.stats, self.core.scheduler.counters
        served = [record for record in self.records if record.finish_reason is FinishReason.STOP]
        gaps = np.concatenate([np.diff(record.token_times) for record in served] or [np.zeros(0)])
        seconds, running, waiting, held = (np.array(column) for column in self._steps)
        busy = seconds.sum()
        return {
            "policy": self.limits.policy,
            "pages": self.limits.num_pages,
            "page_size": self.limits.page_size,
            "requests": len(self.records),
            "served": len(served),
            "seconds": self.clock.now,
            "busy_seconds": busy,
            "steps": len(seconds),
            "prompt_tokens": counters.prompt_tokens,
            "cached_tokens": counters.cached_tokens,
            "hit_rate": counters.cached_tokens / max(counters.prompt_tokens, 1),
            "output_tokens": sum(len(record.token_times) for record in self.records),
            "preemptions": stats.preemptions,
            "wasted_tokens": stats.wasted_tokens,
            "evictions": stats.evictions,
            "most_passed_over": self.most_passed_over,
            "most_overtaken": max(self.times_overtaken(), default=0),
            "running_mean": (running * seconds).sum() / busy,
            "waiting_mean": (waiting * seconds).sum() / busy,
            "waiting_most": waiting.max(),
            "held_mean": (held * seconds).sum() / busy / self.limits.num_pages,
            "ttft_seconds": percentiles([record.first_token_seconds for record in served]),
            "itl_seconds": percentiles(gaps),
        }


def percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """The median, the 99th percentile and the most; 0 where there is nothing."""
    found = np.percentile(values, [50, 99, 100]).tolist() if len(values) else [0.0] * 3
    return dict(zip(("p50", "p99", "most"), found, strict=True))
