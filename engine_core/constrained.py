"""Requests whose text must be as a grammar has it, from their arrival to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from quire.engine_core.admission import Admission
from quire.engine_core.batch import Batch
from quire.engine_core.executor import Executor, RowMask, StepResult
from quire.engine_core.grammars import Grammar, Grammars
from quire.engine_core.limits import EngineLimits
from quire.engine_core.mask_writer import MaskWriter
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.stopping import is_last
from quire.engine_core.validation import RequestError
from quire.kernels.runner import Sequences
from quire.protocol.messages import EngineCoreOutput, SamplingParams

_STOP_SECONDS = 2.0


class Constrained:
    """What the engine does for them at each stage; for others it does nothing."""

    def __init__(
        self, grammars: Grammars | None, limits: EngineLimits, sequences: Sequences, admission: Admission
    ) -> None:
        """Without `grammars` there are none."""
        self._grammars = grammars
        self._limits = limits
        self._sequences = sequences
        self._admission = admission
        self._masks = MaskWriter(sequences)
        self._num_ruled = 0  # requests that have a constraint

    @property
    def is_compiling(self) -> bool:
        """Whether `settle` may have something to tell."""
        return self._grammars is not None and self._grammars.is_compiling

    def find(self, sampling: SamplingParams) -> Grammar | None:
        """The grammar of a request that comes, None without one. Raises RequestError if it is known to be of no use."""
        if sampling.structured_outputs is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine knows no grammars; leave structured_outputs out")
        grammar = self._grammars.find(sampling.structured_outputs)
        if grammar.error is not None:
            raise RequestError(_explain(grammar))
        return grammar

    def begin(self, request: Request, grammar: Grammar | None) -> None:
        """Lets a request be ruled by its grammar, or wait for it if it is still being compiled."""
        if grammar is None:
            return
        if grammar.is_ready:
            self._rule(request, grammar)
        else:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.grammar = grammar
            grammar.requests[request] = None

    def settle(self) -> Iterator[tuple[Request, str | None]]:
        """The requests that need not wait any longer, and what is wrong with their grammar, if anything is.

        Those in whose grammar nothing is wrong may start; the others are still to be ended.
        """
        assert self._grammars is not None
        for grammar in self._grammars.take_compiled():
            for request in list(grammar.requests):
                if grammar.error is None:
                    self._leave(request, grammar)
                    self._rule(request, grammar)
                yield request, None if grammar.error is None else _explain(grammar)

    def masks(self, batch: Batch, step_seconds: float) -> Sequence[RowMask]:
        """Of the tokens that a step draws, by row. Some are written while it runs, for about `step_seconds`."""
        return self._masks.begin(batch, step_seconds) if self._num_ruled else ()

    def check(self, executor: Executor, batch: Batch, masks: Sequence[RowMask], result: StepResult) -> None:
        """Draws again for those who drew ahead of their masks what may not come."""
        ahead = [row for row, mask in masks if mask is None]
        if not ahead:
            return
        token_ids = result.token_ids  # a copy
        refused: list[RowMask] = []
        for row in ahead:
            constraint = batch.requests[row].constraint
            assert constraint is not None
            if (token_id := token_ids[row]) < 0 or constraint.take(token_id):
                continue
            if not executor.guess_again(result, row, constraint.take):
                constraint.pause()
                self._masks.write(constraint)
                refused.append((row, constraint.mask))
        if refused:
            executor.redraw(result, refused)

    def follow(self, request: Request, output: EngineCoreOutput) -> bool:
        """Goes on in the grammar by the token of `output`, and adds those that must follow; whether it ends so."""
        constraint, token_ids = request.constraint, output.new_token_ids
        assert constraint is not None
        if constraint.error is not None or token_ids[0] in request.stop_token_ids:
            return True
        constraint.follow(token_ids[0])
        if constraint.forced and request.sampling.logprobs is None:
            self._jump(request, constraint.forced, token_ids)
        return is_last(request, token_ids[-1]) or constraint.has_ended

    def _jump(self, request: Request, forced: deque[int], token_ids: list[int]) -> None:
        """Adds the forced tokens. With the one that was drawn they are computed as a chunk, which is no decode."""
        while forced and not is_last(request, token_ids[-1]):
            token_ids.append(forced.popleft())
            self._sequences.append(request.slot, token_ids[-1])
            request.num_tokens += 1
        self._admission.decoded(len(token_ids))

    def end(self, request: Request) -> None:
        """A request ends, wherever it stands."""
        if request.grammar is not None:
            self._leave(request, request.grammar)
        self._num_ruled -= request.constraint is not None

    def stop(self) -> bool:
        """Ends the threads; False if one of them is at something that takes too long, and can't be interrupted."""
        has_written = self._masks.stop(_STOP_SECONDS)
        return (self._grammars is None or self._grammars.stop(_STOP_SECONDS)) and has_written

    def _rule(self, request: Request, grammar: Grammar) -> None:
        assert self._grammars is not None
        request.constraint = self._grammars.constrain(grammar, self._limits.vocab_size, request.stop_token_ids)
        self._num_ruled += 1

    def _leave(self, request: Request, grammar: Grammar) -> None:
        assert self._grammars is not None
        self._grammars.leave(grammar, request)
        request.grammar = None


def _explain(grammar: Grammar) -> str:
    return f"structured_outputs.{grammar.key[0]} can't be used: {grammar.error}"
