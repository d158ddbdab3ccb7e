"""The update: what a step's result means to the requests of its batch, and how requests end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from quire.engine_core.executor import Executor, StepResult
from quire.engine_core.grammar.constrained import ConstrainedRequests
from quire.engine_core.open_requests import OpenRequests
from quire.engine_core.outputs import Outputs
from quire.engine_core.request import Request, RequestStatus, StepOutcome
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.engine_core.trace import Tracer
from quire.protocol.messages import EngineCoreOutput, ErrorKind, FinishReason

logger = logging.getLogger(__name__)


class Finisher:
    """Ends requests, whatever the reason: each gets one terminal output, and gives back all that it holds."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: OpenRequests,
        constrained: ConstrainedRequests,
        outputs: Outputs,
        tracer: Tracer,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._constrained = constrained
        self._outputs = outputs
        self._tracer = tracer
        self._clock = clock

    def finish(
        self, request: Request, reason: FinishReason, error: str | None = None, kind: ErrorKind = ErrorKind.FAILED
    ) -> None:
        """End a request between tokens: its terminal output carries none. `kind` is that of an ERROR."""
        now = self._clock()
        output = EngineCoreOutput(request.request_id, error=error)
        output.error_kind = kind if reason is FinishReason.ERROR else None
        self._outputs.add(request.client_id, request.conclude(output, reason, now))
        self.release(request, output, now)

    def release(self, request: Request, output: EngineCoreOutput, now: float) -> None:
        """Take back all that a request holds whose terminal output is on its way."""
        if self._tracer.subscribers:
            self._tracer.finished(request, output.finish_reason, now)
        self._scheduler.remove(request)
        self._constrained.end(request)
        if request.num_output_tokens:
            self._scheduler.admission.ended()
        request.status = RequestStatus.FINISHED
        self._requests.remove(request)


class StepUpdate:
    """Runs the executor on a batch, and moves each request on by what was computed."""

    def __init__(
        self,
        executor: Executor,
        finisher: Finisher,
        constrained: ConstrainedRequests,
        outputs: Outputs,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._finisher = finisher
        self._constrained = constrained
        self._outputs = outputs
        self._clock = clock

    def execute(self, batch: Batch) -> StepResult | None:
        """Compute a batch. None if the step failed as a whole: its requests have ended then, others go on."""
        try:
            return self._executor.step(batch.slots, batch.starts, batch.counts)
        except Exception as error:  # noqa: BLE001 - whatever it is, clients are told, and other requests go on
            self._fail(batch.requests, error)
            return None

    def apply(self, batch: Batch, result: StepResult, now: float) -> None:
        """Move each request on, those with deferred samples last, as these complete."""
        try:
            for row, entries in result.prompt_logprobs.items():
                batch.requests[batch.index_of(row)].add_prompt_logprobs(entries)
            deferred = dict.fromkeys(batch.index_of(row) for row in result.pending)
            first_rows: Iterable[tuple[Request, int]] = zip(batch.requests, batch.rows, strict=True)
            if deferred:
                first_rows = [pair for index, pair in enumerate(first_rows) if index not in deferred]
            self._take(batch, result, first_rows, deferred, now)
            for complete in self._collect(batch, result, deferred):
                first_rows = [(batch.requests[index], batch.rows[index]) for index in complete]
                token_ids = self._take(batch, result, first_rows, deferred, self._clock())
                self._constrained.advance([(request, token_ids[row]) for request, row in first_rows])
        except BaseException:
            while self._executor.collect(result):  # no sample may complete for a request that has ended
                pass
            raise

    def _collect(self, batch: Batch, result: StepResult, deferred: dict[int, None]) -> Iterator[list[int]]:
        """Yield deferred requests whose samples are complete. If collecting fails, end those that are left."""
        try:
            while deferred:
                complete = [batch.index_of(row) for row in self._executor.collect(result)]
                for index in complete:
                    del deferred[index]
                yield complete
        except Exception as error:  # noqa: BLE001 - whatever it is, clients are told, and other requests go on
            self._fail([batch.requests[index] for index in deferred], error)

    def _take(
        self,
        batch: Batch,
        result: StepResult,
        first_rows: Iterable[tuple[Request, int]],
        deferred: Collection[int],
        now: float,
    ) -> Sequence[list[int]]:
        """Let requests of a batch take the result, from their first rows on, and return the spans of all rows.

        Requests that failed end, unless they are `deferred`. This is the per-token path: keep it short.
        """
        outcome = StepOutcome(result, now)
        if outcome.errors:
            self._end_failed(batch, outcome, deferred)
            first_rows = [pair for pair in first_rows if not pair[0].is_finished]
        counts, by_client = batch.counts, self._outputs.by_client
        try:
            for request, row in first_rows:
                request.num_computed_tokens += counts[row]
                output = request.decoding.take(request, row, outcome)
                if output is not None:
                    by_client[request.client_id].append(output)
        finally:  # a request whose terminal output is on its way gets no other, whatever comes
            for request, output in outcome.ended:
                self._finisher.release(request, output, now)
        return outcome.token_ids

    def _end_failed(self, batch: Batch, outcome: StepOutcome, deferred: Collection[int]) -> None:
        for row, text in outcome.errors.items():
            index = batch.index_of(row)
            request = batch.requests[index]
            if index not in deferred and not request.is_finished:
                kind = ErrorKind.INVALID if self._constrained.is_at_fault(request) else ErrorKind.FAILED
                self._finisher.finish(request, FinishReason.ERROR, text, kind)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        logger.error("a step with %d requests failed", len(requests), exc_info=error)
        for request in requests:
            if not request.is_finished:
                text = f"the engine failed to compute this step: {error}"
                self._finisher.finish(request, FinishReason.ERROR, text)
