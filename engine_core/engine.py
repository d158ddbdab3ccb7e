"""The engine core: requests in, one step for all of them at a time, increments out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from quire.engine_core.decoding.stopping import explain_timeout
from quire.engine_core.executor import Executor
from quire.engine_core.feature import Feature, held_status, hooks
from quire.engine_core.grammar.constrained import ConstrainedRequests
from quire.engine_core.grammar.grammars import Grammars
from quire.engine_core.host import EngineHost
from quire.engine_core.intake import Intake
from quire.engine_core.kv_tiers.peers import PeerSet
from quire.engine_core.kv_tiers.tier import KvTier
from quire.engine_core.memory import MemoryGuard
from quire.engine_core.open_requests import OpenRequests
from quire.engine_core.outputs import Outputs, Send
from quire.engine_core.queue_bounds import QueueBounds
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.engine_core.stats import add_step, collect_stats
from quire.engine_core.update import StepUpdate
from quire.engine_core.utilities import DEFERRED, perform
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    Abort,
    ClientMessage,
    EngineCoreRequest,
    EngineMessage,
    ErrorKind,
    FinishReason,
    Goodbye,
    KvFetch,
    KvFetched,
    KvMessage,
    SchedulerStats,
    UtilityCall,
    UtilityResult,
)
from quire.protocol.totals import EngineTotals


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine that it can do without: features (features.py), and what grammars, KV and memory need.

    `tiers`: those nearer to this engine first; `peers`, one of the features, has those that come after them.
    """

    features: Sequence[Feature] = ()
    grammars: Grammars | None = None
    tiers: Sequence[KvTier] = ()
    peers: PeerSet | None = None
    memory: MemoryGuard | None = None

    def tiers_of(self, source: str) -> Sequence[KvTier]:
        """Return the tiers of a request with this `kv_source`."""
        return self.tiers if self.peers is None else (*self.tiers, *self.peers.of(source))


class EngineCore:
    """Owns every request from its message to its terminal output.

    Each request that arrives ends in exactly one output with a `finish_reason`, sent to its own client only; the one
    exception is a `request_id` that this client already uses, which is answered with an ErrorMessage, because an output
    would be taken for the other's. Not thread-safe: one loop calls it. `send` must not block.
    """

    def __init__(
        self,
        executor: Executor,
        limits: EngineShape,
        send: Send,
        parts: EngineParts = EngineParts(),
        host: EngineHost = EngineHost(),  # noqa: B008 - frozen
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler = Scheduler(
            executor, limits, clock, parts.features, tiers=parts.tiers_of, wake=host.wake
        )
        self.features, self.tiers = parts.features, parts.tiers
        self.host = host
        self.limits = limits
        self.clock = clock
        self.sequences = executor.sequences
        self.last_batch = Batch()
        self.last_step = SchedulerStats()  # without queues and pages
        self.last_stats = SchedulerStats()  # as of the end of the last step; any thread may read it
        self._totals = EngineTotals()
        self._memory = parts.memory
        self._outputs = outputs = Outputs(send, clock)
        self._constrained = constrained = ConstrainedRequests(parts.grammars, limits, scheduler.admission, clock)
        self._requests = requests = OpenRequests(scheduler, constrained, outputs, clock, parts.features)
        bounds = QueueBounds(scheduler.waiting, limits, parts.memory, lambda: requests.num_bytes)
        self._intake = Intake(
            requests, constrained, outputs, bounds, limits, executor.sequences, parts.features, seed=seed
        )
        self._update = StepUpdate(
            executor, requests, constrained, outputs, clock, parts.features, is_supervised=host.is_supervised
        )
        self._scheduled, self._after_step = (
            hooks(parts.features, Feature.scheduled),
            hooks(parts.features, Feature.update),
        )
        self._take_ready = hooks(parts.features, Feature.take_ready)
        self._held_status = hooks(parts.features, Feature.held_status)
        self._end_step, self._report = hooks(parts.features, Feature.end_step), hooks(parts.features, Feature.report)
        for feature in parts.features:
            feature.attach(requests)

    @property
    def draining(self) -> bool:
        """True if open requests go on and new ones are rejected."""
        return self._intake.draining

    @property
    def has_requests(self) -> bool:
        """True if a request has not ended."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """True if there is anything to step for. A request that waits for its grammar is nothing to step for."""
        return self.scheduler.has_requests or self._constrained.has_compiled

    @property
    def stats(self) -> SchedulerStats:
        """The engine as it is now; tokens and times are those of the last step."""
        return collect_stats(self.last_step, self.scheduler, self.sequences)

    @property
    def totals(self) -> EngineTotals:
        """Counts since the engine's start."""
        counters = self.scheduler.counters
        totals = msgspec.structs.replace(
            self._totals, prompt_tokens=counters.prompt_tokens, cached_tokens=counters.cached_tokens
        )
        for feature in self.features:
            feature.count(totals)
        return totals

    def reject_early(self, client_id: bytes, message: EngineCoreRequest) -> EngineMessage | None:
        """Return the answer to a request that is rejected at once, None to receive it. Any thread: see Intake."""
        return self._intake.reject_early(client_id, message)

    def is_open(self, client_id: bytes, request_id: str) -> bool:
        """Return True if a client's request with this id has been accepted, and has not ended. Any thread."""
        return self._intake.is_open(client_id, request_id)

    def flush(self, stats: SchedulerStats | None = None) -> None:
        """Send each client its outputs."""
        self._outputs.flush(stats)

    def receive(self, client_id: bytes, message: ClientMessage) -> None:
        """Take one message of a client; Hello and Ping are the server's and mean nothing here."""
        match message:
            case EngineCoreRequest():
                self._intake.receive(client_id, message)
            case Abort():
                # The last first: no successor starts in the place of a request that ends before it ends itself.
                for request_id in reversed(message.request_ids):
                    if request := self._requests.find(client_id, request_id):  # else it has just ended by itself
                        self._requests.finish(request, FinishReason.ABORT)
            case Goodbye():
                self._end_client(client_id, FinishReason.ABORT)
                for feature in self.features:
                    feature.forget(client_id)
            case UtilityCall():
                self._answer(client_id, message)
            case _:
                is_taken = any(feature.receive(client_id, message) for feature in self.features)
                if not is_taken and isinstance(message, KvFetch):
                    self._outputs.send(client_id, KvFetched(message.fetch_id, "this engine serves no KV pages"))

    def receive_kv(self, client_id: bytes, message: KvMessage) -> None:
        """Take a message of another engine that need not wait for the step to end. Any thread."""
        for feature in self.features:
            feature.receive_kv(client_id, message)

    def report_sent(self, client_id: bytes) -> None:
        """Note that a PrefixReport to a client has left, and step for the next one. Any thread."""
        for feature in self.features:
            feature.report_sent(client_id)
        self.host.wake()

    def drain(self) -> None:
        """Reject new requests from now on; all others may start, as no other engine takes them."""
        self._intake.draining = True
        self.scheduler.starts_only_begun = False

    def stop_starting(self) -> None:
        """Start no more requests; those that have begun go on."""
        self.scheduler.starts_only_begun = True

    def end_all(self, error: str | None = None) -> None:
        """End every request, with ABORT, or with ERROR if there is an `error` to report, and send the outputs."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        for client_id in self._requests.clients:
            self._end_client(client_id, reason, error)
        self.flush()
        self._report_all(self.clock(), Batch(), None)

    def stop(self) -> bool:
        """End the threads that work for this engine, when it steps no more; return False if one can't be ended."""
        have_ended = [tier.stop() for tier in self.tiers] + [feature.stop() for feature in self.features]
        return self._constrained.stop() and all(have_ended)

    def _evict(self) -> None:
        """Give back the memory that can be had again."""
        self._constrained.evict()
        for feature in self.features:
            feature.evict()

    def step(self) -> None:
        """Schedule, execute, update and send what one step adds. Without requests only send what is due."""
        begun = self.clock()
        if self._memory is not None:
            self._memory.check(begun, self._evict, is_idle=not self._requests)
        self._end_overdue(begun)
        self._release_held()
        batch = self.scheduler.schedule()
        for note in self._scheduled:
            note(batch)
        for request, text in batch.failed:
            self._requests.finish(request, FinishReason.ERROR, text, ErrorKind.INVALID)
        self._constrained.prepare(batch)
        self.flush()  # rejections and aborts need not wait for the step
        if not batch.step.counts:
            self._update_features()
            self._report_all(begun, batch, None)
            return
        scheduled = self.clock()
        result = self._update.execute(batch)
        executed = self.clock()
        if result is not None:
            self._update.apply(batch, result, executed)
        self._learn(batch, None if result is None else self.clock() - begun)
        self.last_batch = batch
        record = SchedulerStats(
            step=self.last_step.step + 1,
            prefill_tokens=batch.num_prefill_tokens,
            decode_tokens=batch.num_decode_rows,
            draft_tokens=sum(batch.step.num_drafts),
            accepted_tokens=sum(batch.accepted),
            cached_tokens=batch.num_cached_tokens,
            schedule_seconds=scheduled - begun,
            execute_seconds=executed - scheduled,
            update_seconds=self.clock() - executed,
        )
        self.record_step(record)
        add_step(self._totals, record)
        self.last_stats = stats = self.stats
        self.flush(stats)
        self._report_all(begun, batch, stats)

    def record_step(self, record: SchedulerStats) -> None:
        """Make this the last step in all statistics."""
        self.last_step = record

    def _learn(self, batch: Batch, seconds: float | None) -> None:
        """Learn from a step that has been computed in so many seconds; None if that took several attempts."""
        if seconds is not None:
            self.scheduler.learn(batch, seconds)
        for end_step in self._end_step:
            end_step(batch, seconds)
        self._update_features()

    def _update_features(self) -> None:
        for update in self._after_step:
            update()

    def _report_all(self, begun: float, batch: Batch, stats: SchedulerStats | None) -> None:
        for report in self._report:
            report(begun, batch, stats)

    def _end_overdue(self, now: float) -> None:
        """End the requests whose time is up, whatever their state."""
        for request in self._requests.overdue(now):
            self._requests.finish(request, FinishReason.TIMEOUT, explain_timeout(request))

    def _release_held(self) -> None:
        """Let requests start that their grammar or a feature has held, and end those for which it has an error."""
        compiled = self._constrained.take_compiled() if self._constrained.is_compiling else ()
        for request, error in chain(compiled, *(take_ready() for take_ready in self._take_ready)):
            if error is not None:
                self._requests.finish(request, FinishReason.ERROR, str(error), error.kind)
            elif (status := held_status(self._held_status, request)) is not None:
                request.status = status
            elif not self._constrained.holds(request):
                self.scheduler.release(request)

    def _end_client(self, client_id: bytes, reason: FinishReason, error: str | None = None) -> None:
        for request in self._requests.of_client(client_id):
            self._requests.finish(request, reason, error)

    def _answer(self, client_id: bytes, call: UtilityCall) -> None:
        result = UtilityResult(call.call_id)
        try:
            result.result = perform(self, client_id, call)
        except ValueError as error:
            result.error = str(error)
        if result.result is DEFERRED:
            return
        self._outputs.send(client_id, result)
