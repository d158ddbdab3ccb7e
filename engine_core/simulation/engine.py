"""One simulated engine: everything a real one has, but a model and a socket."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.engine_core.limits import EngineLimits
from quire.engine_core.simulation.clock import VirtualClock
from quire.engine_core.simulation.core import SimulatedCore
from quire.engine_core.simulation.executor import SimulatedExecutor
from quire.engine_core.simulation.run import Run
from quire.engine_core.simulation.tokens import EOS, VOCAB_SIZE, prompt_tokens
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    ErrorKind,
    FinishReason,
    SamplingParams,
)
from quire.protocol.simulation import EngineSummary, SimulatedRequest, StepTime

_CLIENT = b"simulation"


def limits_of(shape: EngineShape) -> EngineLimits:
    """What an engine of this shape allows; its tokens are the simulation's."""
    return EngineLimits(**msgspec.structs.asdict(shape) | {"vocab_size": VOCAB_SIZE})


@dataclass(slots=True)
class Answer:
    """What has come of one request so far; times are the engine's, in virtual seconds."""

    request: SimulatedRequest
    sent: float  # by the client
    token_times: array[float] = field(default_factory=lambda: array("d"))
    events: list[EngineCoreEvent] = field(default_factory=list)
    cached_tokens: int = 0
    ended: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None


class SimulatedEngine:
    """Steps when it is told to, and tells the first token and the end of each request as soon as it knows them.

    Steps in which no request begins or ends are put off until one does, or comes, and then done at once; with
    `is_stepwise` each is done alone, which comes to the same. `wake_seconds` tells how long it takes to begin when it
    has had nothing to do for so many seconds.
    """

    def __init__(
        self,
        limits: EngineLimits,
        step_time: StepTime,
        *,
        wake_seconds: Callable[[float], float] = lambda _: 0.0,
        tells_lengths: bool = True,
        is_stepwise: bool = False,
        on_first_token: Callable[[Answer], None] = lambda _: None,
        on_end: Callable[[Answer], None] = lambda _: None,
    ) -> None:
        self.limits = limits
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(limits, step_time, self.clock)
        self.core = SimulatedCore(self.executor, limits, self._take, self.clock)
        self.num_requests = 0
        self.num_output_tokens = 0
        self._idle_seconds = 0.0
        self._wake_seconds = wake_seconds
        self._is_stepwise = is_stepwise
        self._run = Run(0.0)
        self._tells_lengths = tells_lengths
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._coming: deque[tuple[float, SimulatedRequest]] = deque()
        self._answers: dict[str, Answer] = {}

    def send(self, request: SimulatedRequest, sent: float, queued: float) -> None:
        """Lets a request that was sent at one time come to the queue at another, not before those sent earlier."""
        self.num_requests += 1
        self._answers[str(request.index)] = Answer(request, sent)
        self._coming.append((queued, request))
        self._run.cut(queued)

    @property
    def next_step(self) -> float:
        """When the next step begins that is not put off; infinite when there is nothing to do."""
        if self.core.has_requests:
            return self._run.end
        if not self._coming:
            return math.inf
        now, first = self.clock.now, self._coming[0][0]
        if first < now:
            return now  # who came during the last step is found after it
        return first + self._wake_seconds(first - now)

    def step(self) -> None:
        """Goes on to the next step and does it; before, it takes what has come.

        RuntimeError if there is work and time doesn't pass, as this would go on for ever.
        """
        began = self.next_step
        self.catch_up(began)
        self._idle_seconds += began - self.clock.now
        self.clock.now = began
        while self._coming and self._coming[0][0] <= began:
            self.core.receive(_CLIENT, self._message(self._coming.popleft()[1]))
        self.core.step()
        if self.clock.now == began and self.core.has_requests:
            waiting = len(self.core.scheduler.waiting)
            raise RuntimeError(f"at {began} s a step took no time, and {waiting} requests wait; is the base time 0?")
        self._foresee()

    def catch_up(self, until: float) -> None:
        """Does the steps that begin before `until`, of those that are put off."""
        run = self._run.take(until)
        if not run.ends:
            return
        self.core.pass_through(run)
        self.clock.now = run.end
        self.num_output_tokens += len(run.ends) * len(run.decodes)
        for request in run.decodes:
            self._answers[request.request_id].token_times.extend(run.ends)

    def _foresee(self) -> None:
        self._run = Run(self.clock.now) if self._is_stepwise else self.core.foresee()
        if self._coming:
            self._run.cut(self._coming[0][0])

    @property
    def summary(self) -> EngineSummary:
        """What it has done, and what it holds."""
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
        )

    def _message(self, request: SimulatedRequest) -> EngineCoreRequest:
        tokens = prompt_tokens(request.blocks, request.block_tokens, request.prompt_tokens)
        length = request.output_tokens
        params = SamplingParams(
            max_tokens=length if self._tells_lengths else None,
            min_tokens=length,
            ignore_eos=self._tells_lengths,
            seed=0,
        )
        return EngineCoreRequest(str(request.index), tokens, params, [EOS])

    def _take(self, _client: bytes, message: EngineMessage) -> None:
        """The engine's messages. This is the per-token path: keep it short."""
        assert isinstance(message, EngineCoreOutputs)
        now, answers = message.timestamp, self._answers
        for output in message.outputs:
            answer = answers[output.request_id]
            if output.new_token_ids:
                self.num_output_tokens += 1
                answer.token_times.append(now)
            if output.events:
                self._take_events(answer, output)
            if output.finish_reason is not None:
                self._end(answer, output, now)

    def _take_events(self, answer: Answer, output: EngineCoreOutput) -> None:
        answer.events += output.events
        answer.cached_tokens = max(answer.cached_tokens, output.num_cached_tokens)
        if len(answer.token_times) == 1 and output.new_token_ids:
            self._on_first_token(answer)

    def _end(self, answer: Answer, output: EngineCoreOutput, now: float) -> None:
        del self._answers[output.request_id]
        answer.ended, answer.finish_reason = now, output.finish_reason
        answer.error, answer.error_kind = output.error, output.error_kind
        self._on_end(answer)
