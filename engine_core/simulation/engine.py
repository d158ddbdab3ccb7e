"""One simulated engine: a real one without a model and a socket."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from quire.engine_core.loop import IDLE_SECONDS
from quire.engine_core.simulation.drafts import simulated_speculation
from quire.engine_core.simulation.executor import EOS, VOCAB_SIZE, SimulatedExecutor, VirtualClock, prompt_tokens
from quire.engine_core.simulation.foresight import ForeseenSteps, SimulatedCore
from quire.engine_core.simulation.page_exchange import PageNetwork
from quire.engine_core.simulation.reports import CacheWatch, EngineReport
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    ClientMessage,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    ErrorKind,
    FinishReason,
    KvFetched,
    KvPeers,
    SamplingParams,
)
from quire.protocol.simulation import EngineSummary, SimulatedRequest, StepTime
from quire.protocol.speculative_config import SpeculativeConfig

_CLIENT = b"simulation"


def limits_of(shape: EngineShape) -> EngineShape:
    """Return the limits of an engine of this shape, with the vocabulary of the simulation."""
    return msgspec.structs.replace(shape, vocab_size=VOCAB_SIZE)


@dataclass(slots=True)
class SimulatedAnswer:
    """The answer to one request so far; times are the engine's, in virtual seconds."""

    request: SimulatedRequest
    sent: float  # time at which the client sent the request
    token_times: array[float] = field(default_factory=lambda: array("d"))
    events: list[EngineCoreEvent] = field(default_factory=list)
    cached_tokens: int = 0
    ended: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """The time that an engine takes: for a `step`, and to begin after some seconds without work."""

    step: StepTime
    wake_seconds: Callable[[float], float] = lambda _: 0.0


class _Coming(NamedTuple):
    """A request, or a message of another engine, that is on its way: it arrives at `time`, of several by `number`.

    `source`: another engine that has more of the request's prompt. `wakes`: there will be work for an engine without.
    """

    time: float
    number: int
    client_id: bytes
    message: SimulatedRequest | ClientMessage
    wakes: bool
    source: int | None = None


class SimulatedEngine:
    """An engine that steps on request, and reports the first token and the end of each request.

    With `on_report` it also reports the steps in which these come, and its prefix cache after them. What changes there
    in the steps between is reported then: a prompt's pages with its first token.

    Steps in which no request begins or ends are put off until one does, or arrives, and then taken at once; with
    `is_stepwise`, or if tokens are drafted, each is taken alone, with the same result.
    """

    def __init__(
        self,
        limits: EngineShape,
        timing: EngineTiming,
        *,
        tells_lengths: bool = True,
        is_stepwise: bool = False,
        on_first_token: Callable[[SimulatedAnswer], None] = lambda _: None,
        on_end: Callable[[SimulatedAnswer], None] = lambda _: None,
        on_report: Callable[[EngineReport], None] | None = None,
        speculative_config: SpeculativeConfig | None = None,
        network: PageNetwork | None = None,
    ) -> None:
        """`network`: the engines from which this one fetches prefixes, in which it gets the next number."""
        self.limits = limits
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(limits, timing.step, self.clock)
        speculation, drafts = simulated_speculation(speculative_config, self.executor.sequences, limits, self.clock)
        if drafts is not None:
            self.executor.accept = drafts.accept
        self._exchange = None if network is None else network.join(self.clock)
        self.core = SimulatedCore(self.executor, limits, self._take, self.clock, speculation, self._exchange)
        self.num_requests = 0
        self.num_output_tokens = 0
        self._idle_seconds = 0.0
        self._worked = 0.0  # time at which there was last any work for it
        self._wake_seconds = timing.wake_seconds
        self._is_stepwise = is_stepwise
        self._foreseen = ForeseenSteps(0.0)
        self._tells_lengths = tells_lengths
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._on_report = on_report
        self._cache = None if on_report is None else CacheWatch(self.executor.sequences)
        self._has_news = False  # a request has got its first token or its end since the last report
        self._coming: list[_Coming] = []  # a heap
        self._num_coming = 0
        self._answers: dict[str, SimulatedAnswer] = {}

    def introduce(self, addresses: list[str]) -> None:
        """Tell the engine of others from which it may fetch prefixes."""
        self.core.receive(_CLIENT, KvPeers(addresses))

    def send(self, request: SimulatedRequest, sent: float, queued: float, source: int | None = None) -> None:
        """Queue a request at time `queued` that was sent at time `sent`; requests must come in order of both.

        `source`: an engine from which this one may fetch some of the prompt.
        """
        self.num_requests += 1
        self._answers[str(request.index)] = SimulatedAnswer(request, sent)
        self._expect(queued, _CLIENT, request, wakes=True, source=source)

    def post(self, time: float, client_id: bytes, message: ClientMessage, *, wakes: bool) -> None:
        """Let a message of another engine arrive at `time`; `wakes`: there will be work to do."""
        self._expect(time, client_id, message, wakes=wakes)

    def _expect(
        self,
        time: float,
        client_id: bytes,
        message: SimulatedRequest | ClientMessage,
        *,
        wakes: bool,
        source: int | None = None,
    ) -> None:
        self._num_coming += 1
        heapq.heappush(self._coming, _Coming(time, self._num_coming, client_id, message, wakes, source))
        self._foreseen.cut(time)

    @property
    def next_step(self) -> float:
        """The time at which the next step begins that is not put off; infinite when there is nothing to do."""
        if self.core.has_work:
            return self._foreseen.end
        now = self.clock.now
        latest = now + IDLE_SECONDS if self.core.has_requests else math.inf  # they wait for pages, or lose patience
        if not self._coming:
            return latest
        first = self._coming[0]
        if first.time < now:
            return now  # what came during the last step is found after it
        return min(first.time + (self._wake_seconds(first.time - self._worked) if first.wakes else 0.0), latest)

    def step(self) -> None:
        """Move the clock to the next step, receive the requests that have arrived, and step.

        Raises RuntimeError if there is work and time doesn't pass, as this would go on for ever.
        """
        began = self.next_step
        self.catch_up(began)
        self._idle_seconds += began - self.clock.now
        self.clock.now = began
        has_woken = self._receive(began)
        if self._exchange is not None:
            self._exchange.advance()
        self.core.step()
        if has_woken or self.clock.now > began:
            self._worked = self.clock.now
        if self.clock.now == began and self.core.has_work:
            waiting = len(self.core.scheduler.waiting)
            raise RuntimeError(f"at {began} s a step took no time, and {waiting} requests wait; is the base time 0?")
        if self._has_news:
            self._report()
        self._foresee()

    def _receive(self, until: float) -> bool:
        """Take what has arrived; return True if there was work in it."""
        has_woken = False
        while self._coming and self._coming[0].time <= until:
            coming = heapq.heappop(self._coming)
            has_woken |= coming.wakes
            message = coming.message
            if isinstance(message, SimulatedRequest):
                message = self._message(message, coming.source)
            self.core.receive(coming.client_id, message)
        return has_woken

    def catch_up(self, until: float) -> None:
        """Take the steps that were put off and begin before `until`."""
        steps = self._foreseen.take(until)
        if not steps.ends:
            return
        self.core.pass_through(steps)
        self.clock.now = steps.end
        self.num_output_tokens += len(steps.ends) * len(steps.decodes)
        for request in steps.decodes:
            self._answers[request.request_id].token_times.extend(steps.ends)

    def _foresee(self) -> None:
        self._foreseen = ForeseenSteps(self.clock.now) if self._is_stepwise else self.core.foresee()
        if self._coming:
            self._foreseen.cut(self._coming[0].time)

    def _report(self) -> None:
        self._has_news = False
        if self._cache is not None and self._on_report is not None:
            self._on_report(EngineReport(self.clock.now, self.core.last_step, self._cache.take()))

    @property
    def summary(self) -> EngineSummary:
        """Counts of its work, and the pages that it holds."""
        stats, counters = self.core.stats, self.core.scheduler.counters
        return EngineSummary(
            requests=self.num_requests,
            steps=stats.step,
            busy_seconds=self.clock.now - self._idle_seconds,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=self.num_output_tokens,
            preemptions=stats.preemptions,
            evictions=stats.evictions,
            pages_free=stats.pages_free,
            pages_cached=stats.pages_cached,
            pages_held=stats.pages_held,
            fetched_tokens=self.core.scheduler.fetches.num_tokens,
        )

    def _message(self, request: SimulatedRequest, source: int | None) -> EngineCoreRequest:
        tokens = prompt_tokens(request.blocks, request.block_tokens, request.prompt_tokens)
        length = request.output_tokens
        params = SamplingParams(
            max_tokens=length if self._tells_lengths else None,
            min_tokens=length,
            ignore_eos=self._tells_lengths,
            seed=0,
        )
        kv_source = "" if source is None else str(source)
        return EngineCoreRequest(str(request.index), tokens, params, [EOS], kv_source=kv_source)

    def _take(self, client_id: bytes, message: EngineMessage) -> None:
        """Take the engine's messages. This is the per-token path: keep it short."""
        if isinstance(message, KvFetched) and self._exchange is not None:
            self._exchange.refuse(client_id, message)
            return
        assert isinstance(message, EngineCoreOutputs)
        now, answers = message.timestamp, self._answers
        for output in message.outputs:
            answer = answers[output.request_id]
            if token_ids := output.new_token_ids:
                self.num_output_tokens += len(token_ids)
                answer.token_times.extend([now] * len(token_ids))
            if output.events:
                self._take_events(answer, output)
            if output.finish_reason is not None:
                self._end(answer, output, now)

    def _take_events(self, answer: SimulatedAnswer, output: EngineCoreOutput) -> None:
        answer.events += output.events
        answer.cached_tokens = max(answer.cached_tokens, output.num_cached_tokens)
        if 0 < len(answer.token_times) == len(output.new_token_ids):
            self._has_news = True
            self._on_first_token(answer)

    def _end(self, answer: SimulatedAnswer, output: EngineCoreOutput, now: float) -> None:
        del self._answers[output.request_id]
        answer.ended, answer.finish_reason = now, output.finish_reason
        answer.error, answer.error_kind = output.error, output.error_kind
        self._has_news |= output.error is None  # else nothing was computed
        self._on_end(answer)
