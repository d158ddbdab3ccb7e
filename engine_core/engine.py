"""The engine core: requests in, one step for all of them at a time, increments out."""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.decoding.stopping import explain_end, explain_timeout, extend, is_last
from quire.engine_core.executor import Executor, LogprobsEntry, StepResult
from quire.engine_core.grammar.constrained import Constrained
from quire.engine_core.grammar.grammars import Grammars
from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.deadlines import Deadlines
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.engine_core.scheduling.siblings import Siblings
from quire.engine_core.stats import LastStep, add_step, collect_stats
from quire.engine_core.trace import Tracer
from quire.engine_core.transport.inbound import Inbound
from quire.engine_core.utilities import perform
from quire.engine_core.validation import (
    RequestError,
    ShuttingDownError,
    check_queue,
    check_request,
    check_sibling,
)
from quire.protocol.messages import (
    Abort,
    ClientMessage,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    ErrorKind,
    ErrorMessage,
    EventType,
    FinishReason,
    Goodbye,
    SchedulerStats,
    TokenLogprobs,
    UtilityCall,
    UtilityResult,
)
from quire.protocol.totals import EngineTotals

logger = logging.getLogger(__name__)

Send = Callable[[bytes, EngineMessage], None]


class EngineCore:
    """Owns every request from its message to its terminal output.

    Each request that arrives ends in exactly one output with a `finish_reason`, sent to its own client only; the one
    exception is a `request_id` that this client already uses, which is answered with an ErrorMessage, because an output
    would be taken for the other's. Not thread-safe: one loop calls it. `send` must not block.
    """

    def __init__(
        self,
        executor: Executor,
        limits: EngineLimits,
        send: Send,
        *,
        seed: int = 0,
        server_stats: Callable[[], dict[str, int]] = dict,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = Scheduler(executor, limits, clock)
        self.limits = limits
        self.draining = False  # set: what is here goes on, what comes is refused
        self.clock = clock
        self.sequences = executor.sequences
        self._executor = executor
        self._inbound = Inbound()
        self._deadlines = Deadlines()
        self._send = send
        self.tracer = Tracer(send)
        self.server_stats = server_stats
        self._constrained = Constrained(grammars, limits)
        self._seeds = random.Random(seed)
        self._requests: dict[bytes, dict[str, Request]] = {}
        self._increments: defaultdict[bytes, list[EngineCoreOutput]] = defaultdict(list)
        self.last_batch = Batch()
        self._last = LastStep()
        self._totals = EngineTotals()

    @property
    def has_requests(self) -> bool:
        """Whether there are any that have not ended."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to step for. A request that waits for its grammar is nothing to step for."""
        return self.scheduler.has_requests

    @property
    def stats(self) -> SchedulerStats:
        """The engine as it is now; tokens and times are those of the last step."""
        return collect_stats(self._last, self.scheduler, self.sequences)

    @property
    def totals(self) -> EngineTotals:
        """What it has done since its start."""
        counters = self.scheduler.counters
        return msgspec.structs.replace(
            self._totals, prompt_tokens=counters.prompt_tokens, cached_tokens=counters.cached_tokens
        )

    def receive(self, client_id: bytes, message: ClientMessage) -> None:
        """Takes one message of a client; Hello and Ping are the server's and mean nothing here."""
        match message:
            case EngineCoreRequest():
                self._inbound.received(message)
                self._add(client_id, message)
                self._inbound.forget(client_id, message)
            case Abort():
                own = self._requests.get(client_id, {})
                # The last first: no sibling starts in the place of one that ends before it ends itself.
                for request_id in reversed(message.request_ids):
                    if request := own.get(request_id):  # not there: it has just ended by itself
                        self._finish(request, RequestStatus.FINISHED_ABORTED)
            case Goodbye():
                self._end_client(client_id, RequestStatus.FINISHED_ABORTED)
                self.tracer.forget(client_id)
            case UtilityCall():
                self._answer(client_id, message)

    def end_all(self, error: str | None = None) -> None:
        """Ends every request, with ABORT, or with ERROR if there is an `error` to tell, and sends the outputs."""
        status = RequestStatus.FINISHED_ABORTED if error is None else RequestStatus.FINISHED_ERROR
        for client_id in list(self._requests):
            self._end_client(client_id, status, error)
        self.flush()
        self.tracer.flush(self.clock())

    def stop(self) -> bool:
        """Ends the threads that work for this one, when there is nothing more to step; False if one can't be ended."""
        return self._constrained.stop()

    def _add(self, client_id: bytes, message: EngineCoreRequest) -> None:
        request_id, own = message.request_id, self._requests.get(client_id, {})
        if request_id in own:
            text = f"request_id {request_id!r} is in use by a request that has not ended; choose another id"
            self._send(client_id, ErrorMessage(text))
            return
        try:
            self._check_room(message)
            check_request(message, self.limits)
            if (sibling := _sibling_of(message, own)) is not None:
                check_sibling(message, sibling)
            grammar = self._constrained.find(message.sampling_params)
        except RequestError as error:
            self._increments[client_id].append(_refusal(message, error))
            return
        now = self.clock()
        request = Request.from_message(
            client_id, message, seed=self._seeds.getrandbits(63), now=now, limits=self.limits
        )
        if (sibling := _sibling_of(message, own)) is not None:
            sibling.siblings = request.siblings = sibling.siblings or Siblings.of(sibling)
        self._constrained.begin(request, grammar)
        request.record(EventType.QUEUED, now)
        self._requests.setdefault(client_id, own)[request_id] = request
        self.scheduler.add(request)
        if self.tracer.subscribers:
            self.tracer.queued(request, now)
        self._deadlines.add(request)

    def _check_room(self, message: EngineCoreRequest, requests: int = 0, tokens: int = 0) -> None:
        """`requests` with so many prompt `tokens` are on their way to the queue."""
        if self.draining:
            raise ShuttingDownError("the engine is shutting down and takes no more requests; send it to another engine")
        waiting = self.scheduler.waiting
        check_queue(message, len(waiting) + requests, waiting.num_tokens + tokens, self.limits)

    def _end_late(self, now: float) -> None:
        """Ends the requests whose time is up, wherever they stand."""
        for request in self._deadlines.late(now):
            self._finish(request, RequestStatus.FINISHED_TIMEOUT, explain_timeout(request))

    def _start_constrained(self) -> None:
        """Lets those start whose grammar has been compiled, and ends those whose grammar is of no use."""
        for request, error in self._constrained.settle():
            if error is None:
                self.scheduler.let_start(request)
            else:
                self._finish(request, RequestStatus.FINISHED_ERROR, error, ErrorKind.INVALID)

    def _end_client(self, client_id: bytes, status: RequestStatus, error: str | None = None) -> None:
        for request in reversed(list(self._requests.get(client_id, {}).values())):
            self._finish(request, status, error)

    def _answer(self, client_id: bytes, call: UtilityCall) -> None:
        result = UtilityResult(call.call_id)
        try:
            result.result = perform(self, client_id, call)
        except ValueError as error:
            result.error = str(error)
        self._send(client_id, result)

    def refuse_early(self, client_id: bytes, message: EngineCoreRequest) -> EngineCoreOutputs | None:
        """The answer to a request for which there is no room; None lets it in, to be received.

        For the thread that reads the socket, so that a refusal does not wait for the step to end.
        """
        request_id = message.request_id
        # The inbox first: what it forgets is among the requests by then, or has been answered.
        in_use = self._inbound.holds(client_id, request_id) or request_id in self._requests.get(client_id, {})
        if not in_use:  # else `receive` answers
            try:
                self._check_room(message, self._inbound.requests, self._inbound.tokens)
            except RequestError as error:
                return EngineCoreOutputs([_refusal(message, error)], None, self.clock())
        self._inbound.let_in(client_id, message)
        return None

    def step(self) -> None:
        """Schedules, executes, updates and sends what one step adds. Without requests it only sends what is due."""
        begun = self.clock()
        self._end_late(begun)
        if self._constrained.is_compiling:
            self._start_constrained()
        batch = self.scheduler.schedule()
        if self.tracer.subscribers:
            self.tracer.scheduled(batch)
        for request, text in batch.failed:
            self._finish(request, RequestStatus.FINISHED_ERROR, text, ErrorKind.INVALID)
        self._constrained.prepare(batch)
        self.flush()  # refusals and aborts need not wait for the step
        if not batch.counts:
            self.tracer.flush(begun)
            return
        scheduled = self.clock()
        result = self._execute(batch)
        executed = self.clock()
        if result is not None:
            self._update(batch, result, executed)
            self._end_pooled(batch, result, executed)
            self.scheduler.pace.learn(batch.prefill_cost, batch.num_decodes, self.clock() - begun)
        self.last_batch = batch
        self._last = LastStep(
            number=self._last.number + 1,
            prefill_tokens=batch.num_prefill_tokens,
            decode_tokens=batch.num_decodes,
            cached_tokens=batch.num_cached_tokens,
            schedule_seconds=scheduled - begun,
            execute_seconds=executed - scheduled,
            update_seconds=self.clock() - executed,
        )
        add_step(self._totals, self._last)
        self.flush(stats := self.stats)
        if self.tracer.subscribers:
            self.tracer.stepped(begun, stats)

    def flush(self, stats: SchedulerStats | None = None) -> None:
        """Sends the outputs that have come together, to each client its own."""
        if not self._increments:
            return
        now = self.clock()
        for client_id, outputs in self._increments.items():
            self._send(client_id, EngineCoreOutputs(outputs, stats, now))
        self._increments.clear()

    def _execute(self, batch: Batch) -> StepResult | None:
        """None if the step failed as a whole: its requests have ended then, and the others go on."""
        try:
            return self._executor.step(batch.slots, batch.starts, batch.counts)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the others go on
            self._fail([*batch.requests, *batch.searches], error)
            return None

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        logger.error("step %d with %d requests failed", self._last.number + 1, len(requests), exc_info=error)
        for request in requests:
            if not request.status.is_finished:
                self._finish(request, RequestStatus.FINISHED_ERROR, f"the engine failed to compute this step: {error}")

    def _update(self, batch: Batch, result: StepResult, now: float) -> None:
        """Moves each request of the batch on by what was computed, those whose samples are pending last."""
        try:
            for index, entries in result.prompt_logprobs.items():
                self._collect_prompt_logprobs(batch.requests[index], entries)
            rows: Sequence[int] = range(len(batch.requests))  # the beams' rows come after these
            if pending := list(result.pending):
                rows = sorted(set(rows).difference(pending))
            self._advance(batch, result, rows, now)
            for request, beams in batch.searches.items():
                if request.search is not None and not request.status.is_finished:
                    request.num_computed_tokens += 1
                    self._search_on(request, request.search, result, beams, now)
            for rows in self._collect(batch, result, pending):
                self._advance(batch, result, rows, self.clock())
        except BaseException:
            while self._executor.collect(result):  # no sample may be pending of a request that ends
                pass
            raise

    def _collect(self, batch: Batch, result: StepResult, pending: Sequence[int]) -> Iterator[Sequence[int]]:
        """The `pending` rows, as they are sampled. If they fail as a whole, the requests that are left have ended."""
        num_collected = 0
        try:
            while num_collected < len(pending):
                rows = self._executor.collect(result)
                num_collected += len(rows)
                yield rows
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the others go on
            self._fail([batch.requests[row] for row in pending[num_collected:]], error)

    def _advance(self, batch: Batch, result: StepResult, rows: Sequence[int], now: float) -> None:
        """Moves some rows on. The per-token path: keep it short."""
        requests, counts, token_ids = batch.requests, batch.counts, result.token_ids
        increments, errors = self._increments, result.errors
        failed = {batch.owner(row): text for row, text in errors.items() if row not in result.pending}
        for request, text in failed.items():
            if not request.status.is_finished:
                constraint = request.constraint
                is_own = constraint is not None and constraint.wait(0.0) and constraint.error is not None
                kind = ErrorKind.INVALID if is_own else ErrorKind.FAILED  # as in `_end`
                self._finish(request, RequestStatus.FINISHED_ERROR, text, kind)
        for row in rows:
            request, span = requests[row], token_ids[row]
            request.num_computed_tokens += counts[row]
            if not span or row in errors:  # which have ended above
                request.keep_a_token_to_compute()
                continue
            if request.search is not None:
                self._search_on(request, request.search, result, range(row, row + 1), now)
                continue
            num_tokens = len(span)
            if num_tokens == 1:
                request.num_tokens += 1
                ends = is_last(request, span[0])
            else:
                ends = extend(request, span)
                self.scheduler.admission.decoded(len(span))  # they are computed as a chunk, which is no decode
            output = EngineCoreOutput(request.request_id, span)
            if request.events or request.prompt_logprobs is not None:
                if request.num_output_tokens == len(span):
                    request.record(EventType.FIRST_TOKEN, now)
                _attach(request, output)
            if request.sampling.logprobs is not None and (entries := result.logprobs(row)) is not None:
                output.new_logprobs = [TokenLogprobs(*entry) for entry in entries[: len(span)]]
            if request.constraint is not None:
                ends = self._constrained.follow(request.constraint, ends)
            if ends:
                self._end(request, output, now, is_cut=len(span) < num_tokens)
            increments[request.client_id].append(output)

    def _end_pooled(self, batch: Batch, result: StepResult, now: float) -> None:
        """Ends the requests whose prompts have become embeddings."""
        status = RequestStatus.FINISHED_STOPPED
        for index, vector in result.pooled.items():
            request = batch.requests[index]
            self._conclude(request, status, EngineCoreOutput(request.request_id, pooled=vector), now)

    def _search_on(self, request: Request, search: BeamSearch, result: StepResult, rows: range, now: float) -> None:
        """Takes a step of a beam search, of whose beams these are the rows."""
        entries = [result.logprobs(row) or [] for row in rows]
        search.advance([entry for span in entries for entry in span], self.sequences)
        request.num_tokens += 1
        if request.num_output_tokens == 1:
            request.record(EventType.FIRST_TOKEN, now)
        if not search.done:
            request.slot = search.live[0].source
            return
        best, *_ = beams = search.best(request.sampling.n)
        stopped = best.finish_reason is FinishReason.STOP
        status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_LENGTH_CAPPED
        output = EngineCoreOutput(request.request_id, stop_reason=best.stop_reason, beams=beams)
        self._conclude(request, status, output, now)

    @staticmethod
    def _collect_prompt_logprobs(request: Request, entries: Sequence[LogprobsEntry]) -> None:
        if request.prompt_logprobs is not None:  # else they have all been told
            request.prompt_logprobs.extend(TokenLogprobs(*entry) for entry in entries)

    def _end(self, request: Request, output: EngineCoreOutput, now: float, *, is_cut: bool) -> None:
        """Makes `output`, which carries the request's last token, its terminal output; see `explain_end`."""
        end = explain_end(request, output.new_token_ids[-1], self.limits, is_cut=is_cut)
        output.finish_reason, output.stop_reason, output.error = end.status.finish_reason, end.stop_reason, end.error
        output.error_kind = None if end.error is None else ErrorKind.INVALID
        output.is_whole = end.is_whole
        output.events.append(EngineCoreEvent(EventType.FINISHED, now))
        self._release(request, end.status, now)

    def _finish(
        self, request: Request, status: RequestStatus, error: str | None = None, kind: ErrorKind = ErrorKind.FAILED
    ) -> None:
        """Ends a request between tokens: its terminal output carries none. `kind` is that of an ERROR."""
        output = EngineCoreOutput(request.request_id, error=error)
        output.error_kind = kind if status is RequestStatus.FINISHED_ERROR else None
        self._conclude(request, status, output, self.clock())

    def _conclude(self, request: Request, status: RequestStatus, output: EngineCoreOutput, now: float) -> None:
        """Makes `output`, which carries no token, the terminal output of a request."""
        output.finish_reason = status.finish_reason
        request.record(EventType.FINISHED, now)
        _attach(request, output)
        self._increments[request.client_id].append(output)
        self._release(request, status, now)

    def _release(self, request: Request, status: RequestStatus, now: float) -> None:
        """Gives back all that a request holds, whatever ended it."""
        if self.tracer.subscribers:
            self.tracer.finished(request, status, now)
        self.scheduler.remove(request)
        self._constrained.end(request)
        if request.num_output_tokens:
            self.scheduler.admission.ended()
        request.status = status
        own = self._requests[request.client_id]
        del own[request.request_id]
        if not own:
            del self._requests[request.client_id]


def _refusal(message: EngineCoreRequest, error: RequestError) -> EngineCoreOutput:
    reason = RequestStatus.FINISHED_IGNORED.finish_reason
    return EngineCoreOutput(message.request_id, finish_reason=reason, error=str(error), error_kind=error.kind)


def _sibling_of(message: EngineCoreRequest, own: dict[str, Request]) -> Request | None:
    return None if message.sibling is None else own.get(message.sibling)


def _attach(request: Request, output: EngineCoreOutput) -> None:
    """Lets `output` carry what has waited for the request's next output."""
    if request.events:
        output.events, request.events = request.events, []
        output.num_cached_tokens = request.num_cached_tokens
    if request.prompt_logprobs is not None and request.num_computed_tokens >= request.num_prompt_tokens:
        output.new_prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
