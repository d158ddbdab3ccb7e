"""The update: what a step's result means to the requests of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from quire.engine_core.executor import Executor, StepResult
from quire.engine_core.feature import Feature, hooks
from quire.engine_core.grammar.constrained import ConstrainedRequests
from quire.engine_core.open_requests import OpenRequests
from quire.engine_core.outputs import Outputs
from quire.engine_core.request import Request, StepOutcome
from quire.engine_core.scheduling.batch import Batch
from quire.kernels.runner import DeviceLostError
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
        features: Sequence[Feature] = (),
        *,
        is_supervised: bool = False,
    ) -> None:
        """Under a supervisor, requests outlive the process."""
        self._begin_step = hooks(features, Feature.begin_step)
        self._is_supervised = is_supervised
        self._executor = executor
        self._requests = requests
        self._constrained = constrained
        self._outputs = outputs
        self._clock = clock

    def execute(self, batch: Batch, *, is_part: bool = False) -> StepResult | None:
        """Compute a batch, or the part of one that has failed. None if the step failed as a whole.

        Then it has been computed in parts, and its requests have moved on, but for those that broke it, which end.
        Raises what the executor has raised, under a supervisor, if another process can do better.
        """
        for begin_step in self._begin_step:
            begin_step(batch)
        try:
            result = self._executor.collect(self._executor.submit(batch.step))
        except Exception as error:  # noqa: BLE001 - whatever it is, clients get the error, and other requests go on
            self._isolate(batch, error, is_part=is_part)
            return None
        if batch.step.branches:
            batch.first_rows, batch.lookahead_rows = result.first_rows, result.lookahead_rows
        return result

    def apply(self, batch: Batch, result: StepResult, now: float) -> None:
        """Move each request on, those with deferred samples last, as these complete."""
        try:
            for row, entries in result.prompt_logprobs.items():
                batch.requests[batch.index_of(row)].add_prompt_logprobs(entries)
            deferred = dict.fromkeys(batch.index_of(row) for row in result.pending)
            first_rows: Iterable[tuple[Request, int]] = zip(batch.requests, batch.rows, strict=True)
            outcome = StepOutcome(result, now, batch.step.num_drafts, batch.accepted)
            if not self._constrained.has_open:
                self._take(batch, outcome, first_rows, deferred)
                return
            first_rows = [pair for index, pair in enumerate(first_rows) if index not in deferred]
            self._take_constrained(batch, outcome, first_rows, deferred)
            for spans in self._collect(batch, result, deferred):
                first_rows = [(batch.requests[batch.index_of(row)], row) for row in spans]
                outcome = StepOutcome(result, self._clock(), batch.step.num_drafts, batch.accepted, spans)
                self._take_constrained(batch, outcome, first_rows, deferred)
        except BaseException:
            while self._executor.collect_pending(result):  # no sample may complete for a request that has ended
                pass
            raise

    def _isolate(self, batch: Batch, error: Exception, *, is_part: bool) -> None:
        """Compute the halves of a batch that has failed, down to a single request that fails twice, which ends.

        Requests end too that cannot be computed again: those for which more than a sample may have been taken. Under a
        supervisor they go on in the next process, and so does everything when memory is short, or a GPU is lost, which
        ends the engine in any case.
        """
        if self._ends_engine(error):
            raise error
        if len(batch.requests) == 1 and (is_part or not self._take_back(batch, 0)):
            self._fail(batch.requests, error)
            return
        left = [index for index in range(len(batch.requests)) if self._take_back(batch, index)]
        if self._is_supervised and len(left) < len(batch.requests):
            raise error
        logger.warning(
            "a step with %d requests failed; it is computed again, in parts", len(batch.requests), exc_info=error
        )
        if others := [each for index, each in enumerate(batch.requests) if index not in left]:
            self._fail(others, error)
        middle = (len(left) + 1) // 2
        for indices in (left[:middle], left[middle:]):
            part = batch.part(indices)
            if indices and (result := self.execute(part, is_part=True)) is not None:
                self.apply(part, result, self._clock())

    def _ends_engine(self, error: Exception) -> bool:
        """Return True for what ends the process: no request is at fault, and all go on in the next one, if any."""
        return isinstance(error, DeviceLostError) or (self._is_supervised and isinstance(error, MemoryError))

    def _take_back(self, batch: Batch, index: int) -> bool:
        """Take back what the failed step has sampled of a request; return False if it cannot be computed again.

        It cannot where the step has rewritten the state before its tokens.
        """
        request = batch.requests[index]
        sequences = request.sequences
        if request.needs_every_token:
            return False
        for slot, start in zip(request.slots, batch.starts_of(index), strict=True):
            if sequences.num_tokens(slot) > request.num_tokens:
                sequences.truncate(slot, request.num_tokens)  # which drops a full page that others may have by now
                if not sequences.reserve(slot, request.num_tokens):
                    return False
            if sequences.num_computed_tokens(slot) < start:
                return False
        return True

    def _collect(
        self, batch: Batch, result: StepResult, deferred: dict[int, None]
    ) -> Iterator[Mapping[int, list[int]]]:
        """Yield deferred spans that are complete, by row. If collecting fails, end the requests that are left."""
        try:
            while deferred:
                spans = self._executor.collect_pending(result)
                for row in spans:
                    del deferred[batch.index_of(row)]
                yield spans
        except Exception as error:  # whatever it is, clients get the error, and other requests go on
            if self._ends_engine(error):
                raise
            self._fail([batch.requests[index] for index in deferred], error)

    def _take_constrained(
        self, batch: Batch, outcome: StepOutcome, first_rows: list[tuple[Request, int]], deferred: Collection[int]
    ) -> None:
        """Do what `_take` does, and let the constraints among the requests go on."""
        spans = outcome.token_ids
        taken = [(request, spans[row]) for request, row in first_rows]
        self._take(batch, outcome, first_rows, deferred)
        self._constrained.advance(taken)

    def _take(
        self, batch: Batch, outcome: StepOutcome, first_rows: Iterable[tuple[Request, int]], deferred: Collection[int]
    ) -> None:
        """Let requests of a batch take the outcome, from their first rows on.

        Requests that failed end, unless they are `deferred`. This is the per-token path: keep it short.
        """
        if outcome.errors:
            self._end_failed(batch, outcome, deferred)
            first_rows = [pair for pair in first_rows if not pair[0].is_finished]
        by_client = self._outputs.by_client
        try:
            for request, row in first_rows:
                output = request.decoding.take(request, row, outcome)
                if output is not None:
                    by_client[request.client_id].append(output)
        finally:  # a request whose terminal output is on its way gets no other, whatever comes
            for request, output in outcome.ended:
                self._requests.release(request, output, outcome.now)

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
