"""Engine as a target, at its socket, and its answers as their increments arrive."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from quire.frontend.client.engine import ConnectedEngine, choose_router
from quire.frontend.client.engine_client import Delivery, EngineAway, EngineBack, EngineLeft
from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.routing import Routing
from quire.frontend.engine_args import EngineArgs
from quire.frontend.errors import EngineDeadError
from quire.frontend.evaluation.replay.record import Outcome, PhaseTrack, RequestRecord, RunClock, TargetSample
from quire.frontend.evaluation.replay.target import Send, TargetInfo, Tokens, sampling_parameters
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.sampling import SamplingParams, engine_params, validate
from quire.frontend.version import installed_version
from quire.protocol.keys import Security
from quire.protocol.messages import Abort, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.protocol.routing.routers import RoutedRequest

_ABORTED = (FinishReason.ABORT, FinishReason.TIMEOUT)


class EngineAnswer:
    """The record of one request, filled from the engine's increments. `ended` is a future that the caller sets."""

    __slots__ = ("_clock", "_phases", "_record", "ended", "route")

    def __init__(self, record: RequestRecord, clock: RunClock, token_ids: list[int], session: str | None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.route = RoutedRequest(len(token_ids), lambda: token_ids, session=session)
        self._record = record
        self._clock = clock
        self._phases = PhaseTrack(record, clock)

    @property
    def num_tokens(self) -> int:
        """Number of its tokens so far."""
        return self._record.output_tokens

    def take(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take an increment that has just arrived; return True for the first token. This is on the path of each one."""
        record = self._record
        is_first = record.last_token is None and bool(output.new_token_ids)
        if output.events or self._phases.is_catching_up:
            self._phases.note(output, timestamp)
        if output.new_token_ids:
            if record.last_token is None:
                record.cached_tokens = output.num_cached_tokens
            record.grow(len(output.new_token_ids), time.monotonic() - self._clock.begin)
        if output.finish_reason is not None:
            self._finish(output, output.finish_reason)
        return is_first

    def fail(self, error: str) -> None:
        """End the request for a reason that did not come from the engine."""
        self._record.outcome, self._record.error = Outcome.ERRORED, error

    def leave(self) -> None:
        """End the current phase: no more increments are taken."""
        self._phases.end(self._clock.now())

    def _finish(self, output: EngineCoreOutput, reason: FinishReason) -> None:
        record = self._record
        if reason is FinishReason.ERROR:
            record.outcome = Outcome.of_error(output.error_kind)
            record.error = output.error or "the engine gave no reason"
        elif reason in _ABORTED:
            record.outcome = Outcome.LATE if reason is FinishReason.TIMEOUT else Outcome.ERRORED
            record.error = f"the engine ended it: {reason}"
        else:
            record.outcome = Outcome.COMPLETED


_WATCH_SECONDS = 0.1


class EngineTarget:
    """An engine process of its own, or one that is already running. The constructor waits until it is ready.

    The client shares its cores with the engine that it measures. `AsyncLLM` wakes a coroutine and builds an output for
    each increment of each stream; here increments are taken where they arrive, on the client's thread, and the event
    loop is woken only for requests that have ended. That costs less, and times do not include waiting for the loop.
    Raises what `AsyncLLM` raises.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._open: dict[str, EngineAnswer] = {}
        self._ids = itertools.count()
        self._num_tokens = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._routing = Routing(choose_router(args))
        self._engine = ConnectedEngine(args, self._deliver, routing=self._routing)
        ready = self._engine.engines.ready
        address = self._engine.engines.address
        tokenizer = self._engine.tokenizer
        special = frozenset(self._engine.eos_token_ids) | (tokenizer.special_token_ids if tokenizer else frozenset())
        build = f"Quire {installed_version()}"
        self.info = TargetInfo("quire", ready.model, address, ready.max_model_len, ready.vocab_size, special, build)

    @property
    def engines(self) -> EngineSet:
        """The engines, for calls other than requests."""
        return self._engine.engines

    @property
    def security(self) -> Security:
        """The keys of connections to the engines."""
        return self._engine.args.security

    @classmethod
    def from_options(cls, model: str | None = None, **options: Any) -> Self:
        """Make a target from the arguments of `AsyncLLM`."""
        return cls(EngineArgs.from_options(model, options))

    def prepare(self, request: WorkloadRequest, tokens: Tokens) -> Send:
        """Make the prompt's tokens and the parameters. Raises `ValueError` for invalid parameters."""
        token_ids = self._token_ids(request, tokens)
        params = self._params(request)

        async def send(record: RequestRecord, clock: RunClock) -> None:
            record.prompt_tokens = len(token_ids)
            await self._serve(token_ids, params, EngineAnswer(record, clock, token_ids, request.session))

        return send

    async def sample(self, clock: RunClock) -> TargetSample | None:
        """Return the engine's statistics, with the output tokens that arrived here. None once it is dead."""
        try:
            stats = await self.engines.stats()
        except EngineDeadError:
            return None
        totals = stats["totals"]
        return TargetSample(
            clock.now(),
            stats["running"],
            stats["waiting"],
            stats["pages_held"],
            stats["pages_cached"],
            stats["pages_total"],
            totals["prompt_tokens"],
            totals["cached_tokens"],
            self._num_tokens,
        )

    async def reset_cache(self) -> bool:
        """Empty the prefix cache."""
        for call in self.engines.call_each("reset_cache").values():
            await asyncio.wrap_future(call)
        return True

    async def wait_dead(self) -> str:
        """Wait until the engine is dead; return how it died."""
        while (error := self._engine.engines.dead) is None:  # noqa: ASYNC110 - set on another thread
            await asyncio.sleep(_WATCH_SECONDS)
        return str(error)

    async def close(self) -> None:
        """Disconnect from the engine, and end it if it was started here."""
        await asyncio.to_thread(self._engine.close)

    def _token_ids(self, request: WorkloadRequest, tokens: Tokens) -> list[int]:
        if request.messages is not None:
            return self._engine.chat_prompt(request.messages).token_ids
        if request.text is not None:
            return self._engine.prompt(request.text).token_ids
        return tokens(request)

    def _params(self, request: WorkloadRequest) -> SamplingParams:
        requested = sampling_parameters(request)
        if unknown := sorted({*requested} - {*SamplingParams.__struct_fields__}):
            raise ValueError(f"the request's params have {', '.join(unknown)}, which are not fields of SamplingParams")
        checked = validate(SamplingParams(**requested), vocab_size=self._engine.engines.ready.vocab_size)
        return engine_params(checked, 0 if checked.seed is None else checked.seed, self._engine.tokenizer)[0]

    async def _serve(self, token_ids: list[int], params: SamplingParams, answer: EngineAnswer) -> None:
        self._loop = asyncio.get_running_loop()
        wire_id = str(next(self._ids))
        routing, eos = self._routing, self._engine.eos_token_ids
        session = routing.send(answer.route)
        if session is None:
            answer.fail(self.engines.away or "there is no engine")
            return
        self._open[wire_id] = answer
        try:
            source = routing.source_of(answer.route)
            message = EngineCoreRequest(wire_id, token_ids, params, eos, time.monotonic(), kv_source=source)
            self._engine.send(message, session)
            await answer.ended
        except EngineDeadError as error:
            answer.fail(str(error))
        finally:
            if self._open.pop(wire_id, None) is not None:
                with suppress(EngineDeadError):  # then the request has ended already
                    self._engine.send(Abort([wire_id]), session)
            routing.router.ended(answer.route, answer.num_tokens)
            answer.leave()

    def _deliver(self, delivery: Delivery) -> None:
        """Take a frame, on the client's thread."""
        ended: list[EngineAnswer] = []
        if isinstance(delivery, EngineCoreOutputs):
            self._take(delivery, ended)
        elif isinstance(delivery, EngineBack):
            self._on_loop(self._routing.open, delivery.session, delivery.block_size, delivery.address)
        else:
            engine = delivery.engine if isinstance(delivery, EngineAway | EngineLeft) else None
            for wire_id, answer in list(self._open.items()):
                if engine in (None, answer.route.engine) and self._open.pop(wire_id, None) is not None:
                    answer.fail(str(delivery))
                    ended.append(answer)
            self._on_loop(self._lose, engine, ended)
            return
        if ended:
            self._on_loop(_end, ended)

    def _lose(self, engine: int | None, ended: list[EngineAnswer]) -> None:
        """End the answers of an engine that is gone, None for all."""
        for answer in ended:
            self._routing.router.take_back(answer.route)
        if engine is not None:
            self._routing.close(engine)
        _end(ended)

    def _on_loop(self, work: Callable[..., object], *arguments: object) -> None:
        """Have the event loop do something, or do it now if there is none."""
        if self._loop is None or self._loop.is_closed():
            work(*arguments)
        else:
            self._loop.call_soon_threadsafe(work, *arguments)

    def _take(self, delivery: EngineCoreOutputs, ended: list[EngineAnswer]) -> None:
        for output in delivery.outputs:
            answer = self._open.get(output.request_id)
            if answer is None:
                continue  # in flight when its request was aborted
            self._num_tokens += len(output.new_token_ids)
            if answer.take(output, delivery.timestamp) and len(self.engines) > 1:
                self._on_loop(self._routing.router.first_token, answer.route)
            if output.finish_reason is not None:
                self._open.pop(output.request_id, None)  # unless the event loop has just done so
                ended.append(answer)


def _end(ended: list[EngineAnswer]) -> None:
    for answer in ended:
        if not answer.ended.done():
            answer.ended.set_result(None)
