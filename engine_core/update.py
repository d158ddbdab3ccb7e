"""The update: what a step's result means to the requests of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from quire.engine_core.executor import Executor, StepResult
from quire.engine_core.grammar.constrained import ConstrainedRequests
from quire.engine_core.open_requests import OpenRequests
from quire.engine_core.outputs import Outputs
from quire.engine_core.request import Request, StepOutcome
from quire.engine_core.scheduling.batch import Batch
from quire.protocol.messages import ErrorKind, FinishReason

logger = logging.getLogger(__name__)


class StepUpdate:
    """Runs the executor on a batch, and moves each request on by what was computed."""

    def __init__(
        self,
        executor: Executor,
        requests: OpenRequests,
        constrained: ConstrainedRequests,
        outputs: Outputs,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._requests = requests
        self._constrained = constrained
        self._outputs = outputs
        self._clock = clock

    def execute(self, batch: Batch) -> StepResult | None:
        """Compute a batch. None if the step failed as a whole: its requests have ended then, others go on."""
        try:
            return self._executor.step(batch.slots, batch.starts, batch.counts)
        except Exception as error:  # noqa: BLE001 - whatever it is, clients get the error, and other requests go on
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
        except Exception as error:  # noqa: BLE001 - whatever it is, clients get the error, and other requests go on
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
                self._requests.release(request, output, now)
        return outcome.token_ids

    def _end_failed(self, batch: Batch, outcome: StepOutcome, deferred: Collection[int]) -> None:
        for row, text in outcome.errors.items():
            index = batch.index_of(row)
            request = batch.requests[index]
            if index not in deferred and not request.is_finished:
                kind = ErrorKind.INVALID if self._constrained.is_at_fault(request) else ErrorKind.FAILED
                self._requests.finish(request, FinishReason.ERROR, text, kind)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        logger.error("a step with %d requests failed", len(requests), exc_info=error)
        for request in requests:
            if not request.is_finished:
                text = f"the engine failed to compute this step: {error}"
                self._requests.finish(request, FinishReason.ERROR, text)
