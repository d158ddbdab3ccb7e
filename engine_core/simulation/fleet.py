"""A fleet of engines behind a router; takes all events in order of time."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from quire.engine_core.simulation.arrivals import Arrivals
from quire.engine_core.simulation.engine import EngineTiming, SimulatedAnswer, SimulatedEngine, limits_of
from quire.engine_core.simulation.executor import prompt_tokens
from quire.engine_core.simulation.page_exchange import PageNetwork
from quire.engine_core.simulation.reports import FIRST_REPORT, EngineReport
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import MAX_NAMED_PEERS, ClientMessage
from quire.protocol.routing.routers import ROUTERS, RoutedRequest
from quire.protocol.simulation import (
    FetchTime,
    SimulatedRequest,
    SimulatedResult,
    SimulationEnd,
    SimulationSample,
    SimulationSetup,
)

_AnswerEvent = tuple[float, int, bool, int, SimulatedAnswer]
"""The time at which the client learns of it, the request's index, True for the end, False for the first token, the
number of the engine, and the answer."""


class Fleet:
    """One run. Nothing is kept of a request that has ended; `emit` gets its result."""

    def __init__(
        self,
        setup: SimulationSetup,
        emit: Callable[[SimulatedResult | SimulationSample], None],
        *,
        is_stepwise: bool = False,
    ) -> None:
        self._setup = setup
        self._emit = emit
        limits = limits_of(setup.engine)
        self.router = ROUTERS[setup.router](setup.seed)
        self.router.can_fetch = self.router.watches_prefixes and setup.fetch is not None
        network = self._network(setup.fetch, limits)
        self._reports: list[deque[EngineReport]] = [deque() for _ in range(setup.num_engines)]  # on their way
        self.engines = [
            SimulatedEngine(
                limits,
                EngineTiming(setup.step, setup.client.wake_seconds),
                tells_lengths=setup.tells_lengths,
                is_stepwise=is_stepwise,
                on_first_token=partial(self._answered, number, False),
                on_end=partial(self._answered, number, True),
                on_report=self._reports[number].append if self.router.watches_prefixes else None,
                speculative_config=setup.speculative_config,
                network=network,
            )
            for number in range(setup.num_engines)
        ]
        for number, engine in enumerate(self.engines):
            if network is not None:
                engine.introduce([str(each) for each in range(setup.num_engines) if each != number][:MAX_NAMED_PEERS])
        for number in range(setup.num_engines):
            self.router.add(number, limits.block_size)
            self.router.report(number, FIRST_REPORT)
        self._routed: dict[int, RoutedRequest] = {}  # by the request's index
        self._steps: list[tuple[float, int]] = []  # a heap: next steps, some of which have been moved forward since
        self._answers: list[_AnswerEvent] = []  # a heap: news for clients
        self._free = [0.0] * setup.num_engines  # the time since which the client of each engine has sent nothing
        self._ended = 0.0

    def run(self, requests: Iterable[SimulatedRequest]) -> SimulationEnd:
        """Serve requests until the last one has ended. Raises ValueError unless they are in order of arrival."""
        self._arrivals = arrivals = Arrivals(requests, self._setup.concurrency)
        sample = 1  # the number of the next one
        while (time := min(self._next_step, arrivals.time, self._next_answer)) < math.inf:
            is_over = not self._routed and arrivals.time == math.inf  # pages may still be on their way
            if not is_over and (sample_time := sample * self._setup.sample_seconds) <= time:
                self._sample(sample_time)
                sample = self._sample_after(sample, time)
            elif time == self._next_answer:
                self._tell()
            elif time == arrivals.time:
                self._arrive()
            else:
                self._step()
        self._sample(self._ended)
        return SimulationEnd(self._ended, [engine.summary for engine in self.engines])

    @property
    def _next_step(self) -> float:
        return self._steps[0][0] if self._steps else math.inf

    @property
    def _next_answer(self) -> float:
        return self._answers[0][0] if self._answers else math.inf

    def _step(self) -> None:
        """Take the next step, of whichever engine it is."""
        time, number = heapq.heappop(self._steps)
        engine = self.engines[number]
        if engine.next_step == time:
            engine.step()
            self._plan(number)

    def _plan(self, number: int) -> None:
        if (time := self.engines[number].next_step) < math.inf:
            heapq.heappush(self._steps, (time, number))

    def _arrive(self) -> None:
        if (arrival := self._arrivals.pop()) is None:
            return
        time, request = arrival
        self._routed[request.index] = routed = _routed(request)
        number = self.router.send(routed)
        engine = self.engines[number]
        before = engine.next_step
        leaves = max(time, self._free[number])
        self._free[number] = leaves + self._setup.client.to_next
        engine.send(request, time, leaves + self._setup.client.to_engine, routed.source)
        if engine.next_step < before:
            self._plan(number)

    def _network(self, fetch: FetchTime | None, limits: EngineShape) -> PageNetwork | None:
        """Return the network by which engines fetch prefixes, None if they do not."""
        if fetch is None or not self.router.can_fetch or not limits.enable_prefix_caching:
            return None
        return PageNetwork(fetch, limits.block_size, self._post)

    def _post(self, number: int, time: float, client_id: bytes, message: ClientMessage, *, wakes: bool) -> None:
        """Send a message of one engine to another."""
        engine = self.engines[number]
        before = engine.next_step
        engine.post(time, client_id, message, wakes=wakes)
        if engine.next_step < before:
            self._plan(number)

    def _answered(self, number: int, is_end: bool, answer: SimulatedAnswer) -> None:
        """Plan to tell the client of an engine's first token or end."""
        time = (answer.ended if is_end else answer.token_times[0]) + self._setup.client.to_client
        heapq.heappush(self._answers, (time, answer.request.index, is_end, number, answer))

    def _tell(self) -> None:
        time, index, is_end, number, answer = heapq.heappop(self._answers)
        self._hear(number, time)
        if not is_end:
            self.router.first_token(self._routed[index])
            return
        self.router.ended(self._routed.pop(index), len(answer.token_times))
        self._arrivals.ended(answer.request, time)
        self._ended = max(self._ended, time)
        self._emit(self._result(answer, time, number))

    def _hear(self, number: int, time: float) -> None:
        """Tell the router what an engine has reported until a time at which the client hears of it."""
        reports, delay = self._reports[number], self._setup.client.to_client
        while reports and reports[0].time + delay <= time:
            report = reports.popleft()
            self.router.observe(number, report.stats)
            self.router.report(number, report.prefixes)

    def _result(self, answer: SimulatedAnswer, ended: float, number: int) -> SimulatedResult:
        request, delay, times = answer.request, self._setup.client.to_client, answer.token_times
        return SimulatedResult(
            index=request.index,
            arrival=request.arrival,
            sent=answer.sent,
            ended=ended,
            engine=number,
            prompt_tokens=request.prompt_tokens,
            wanted_output_tokens=request.output_tokens,
            token_times=(array("d", [time + delay for time in times]) if delay else times).tobytes(),
            events=answer.events,
            cached_tokens=answer.cached_tokens,
            error=answer.error,
            error_kind=answer.error_kind,
        )

    def _sample_after(self, number: int, time: float) -> int:
        """Return the number of the sample after that one. While no engine has work, nothing changes until `time`.

        Then only the last one before that is taken, so that a chart stays flat: a trace over months would have millions
        of samples.
        """
        is_idle = all(math.isinf(engine.next_step) for engine in self.engines)
        return max(number + 1, math.floor(time / self._setup.sample_seconds) if is_idle else 0)

    def _sample(self, time: float) -> None:
        """Sample all engines; a step that an engine is computing at that time counts as done."""
        for engine in self.engines:
            engine.catch_up(time)
        cores = [engine.core.scheduler for engine in self.engines]
        pools = [engine.core.sequences for engine in self.engines]
        self._emit(
            SimulationSample(
                time=time,
                running=sum(len(core.running) for core in cores),
                waiting=sum(len(core.waiting) for core in cores),
                pages_held=sum(pool.held_pages for pool in pools),
                pages_cached=sum(pool.cached_pages for pool in pools),
                pages_total=self._setup.engine.num_pages * len(pools),
                prompt_tokens=sum(core.counters.prompt_tokens for core in cores),
                cached_tokens=sum(core.counters.cached_tokens for core in cores),
                output_tokens=sum(engine.num_output_tokens for engine in self.engines),
            )
        )


def _routed(request: SimulatedRequest) -> RoutedRequest:
    read = partial(prompt_tokens, request.blocks, request.block_tokens, request.prompt_tokens)
    return RoutedRequest(request.prompt_tokens, read, session=request.session)
