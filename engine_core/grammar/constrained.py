"""Requests whose text must be as a grammar has it, from their arrival to their end."""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.grammar.grammars import Grammar, Grammars
from quire.engine_core.grammar.mask_writer import MaskWriter
from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.validation import RequestError
from quire.kernels.runner import Constraint
from quire.protocol.messages import EventType, SamplingParams

_STOP_SECONDS = 2.0


class Constrained:
    """What the engine does for them at each stage; for others it does nothing."""

    def __init__(self, grammars: Grammars | None, limits: EngineLimits) -> None:
        """Without `grammars` there are none."""
        self._grammars = grammars
        self._limits = limits
        self._masks = MaskWriter()

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
            grammar.requests[request] = None
        request.grammar = grammar

    def settle(self) -> Iterator[tuple[Request, str | None]]:
        """The requests that need not wait any longer, and what is wrong with their grammar, if anything is.

        Those in whose grammar nothing is wrong may start; the others are still to be ended.
        """
        assert self._grammars is not None
        for grammar in self._grammars.take_compiled():
            for request in list(grammar.requests):
                if grammar.error is None:
                    self._grammars.leave(grammar, request)
                    self._rule(request, grammar)
                yield request, None if grammar.error is None else _explain(grammar)

    def prepare(self, batch: Batch) -> None:
        """Has the first mask of those who start written, if that takes long. Later ones are begun by `follow`."""
        for move in batch.moves:
            if move.event is EventType.SCHEDULED and move.request.constraint is not None:
                self._masks.prepare(move.request.constraint)

    def follow(self, constraint: Constraint, is_last: bool) -> bool:
        """Have the next mask written, if that takes long; return whether the request ends instead.

        It does if its last token is the last by itself, or the grammar has come to its end.
        """
        if is_last or constraint.has_ended:
            return True
        self._masks.prepare(constraint)
        return False

    def end(self, request: Request) -> None:
        """A request ends, wherever it stands."""
        grammar, constraint = request.grammar, request.constraint
        if self._grammars is None or grammar is None:
            return
        if constraint is None:
            self._grammars.leave(grammar, request)
        else:
            self._grammars.give_back(grammar, constraint)

    def stop(self) -> bool:
        """Ends the threads; False if one of them is at something that takes too long, and can't be interrupted."""
        has_written = self._masks.stop(_STOP_SECONDS)
        return (self._grammars is None or self._grammars.stop(_STOP_SECONDS)) and has_written

    def _rule(self, request: Request, grammar: Grammar) -> None:
        assert self._grammars is not None
        request.constraint = self._grammars.constrain(grammar, self._limits.vocab_size, request.stop_token_ids)


def _explain(grammar: Grammar) -> str:
    return f"structured_outputs.{grammar.key[0]} can't be used: {grammar.error}"
