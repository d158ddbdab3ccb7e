"""Constrained requests, whose text must match a grammar, from their arrival to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from quire.engine_core.grammar.grammar import Grammar
from quire.engine_core.grammar.grammars import Grammars
from quire.engine_core.grammar.mask_writer import MaskWriter
from quire.engine_core.request import Request, RequestStatus, tenant_of
from quire.engine_core.scheduling.admission import Admission
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.validation import RejectedError
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest, ErrorKind, EventType

_STOP_SECONDS = 2.0
_RELEASE_SECONDS = 0.01  # between two steps: each constraint of a grammar that forces a text may take milliseconds


class ConstrainedRequests:
    """Gives requests their token constraints. Requests without a grammar are none of its business."""

    def __init__(
        self,
        grammars: Grammars | None,
        limits: EngineShape,
        admission: Admission,
        clock: Callable[[], float],
    ) -> None:
        """Without `grammars` it rejects all constrained requests."""
        self._grammars = grammars
        self._limits = limits
        self._admission = admission
        self._clock = clock
        self._compiled: deque[Grammar] = deque()  # for which requests still wait, perhaps
        self._masks = MaskWriter()
        self._grammar_of: dict[Request, Grammar] = {}

    @property
    def is_compiling(self) -> bool:
        """True if `take_compiled` may have something to return, now or later."""
        return self.has_compiled or (self._grammars is not None and self._grammars.is_compiling)

    @property
    def has_compiled(self) -> bool:
        """True if `take_compiled` has something left to return."""
        return bool(self._compiled)

    @property
    def has_open(self) -> bool:
        """True if an open request is constrained."""
        return bool(self._grammar_of)

    def find(self, client_id: bytes, message: EngineCoreRequest) -> Grammar | None:
        """Return the grammar of a new request, None without one. Raises RejectedError if it is known to be invalid."""
        structured = message.sampling_params.structured_outputs
        if structured is None:
            return None
        if self._grammars is None:
            raise RejectedError("this engine knows no grammars; leave structured_outputs out")
        grammar = self._grammars.find(structured, tenant_of(client_id, message))
        if grammar.error is not None:
            raise _explained(grammar, grammar.error)
        return grammar

    def begin(self, request: Request, grammar: Grammar | None) -> None:
        """Constrain a request by its grammar, or let it wait while the grammar is being compiled.

        Raises RejectedError if the tokens that it brings are not of the grammar.
        """
        if grammar is None or self._grammars is None:
            return
        if grammar.is_ready:
            self._constrain(request, grammar)
        else:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            grammar.requests[request] = None
        self._grammar_of[request] = grammar
        self._grammars.kept.hold(grammar)

    def holds(self, request: Request) -> bool:
        """Return True while a request waits for its grammar."""
        return request in self._grammar_of and request.constraint is None

    def take_compiled(self) -> Iterator[tuple[Request, RejectedError | None]]:
        """Yield the requests whose grammar is compiled now, which may start, or the error, with which they must end.

        It ends after a while, with those left that the next call is to return.
        """
        assert self._grammars is not None
        self._compiled += self._grammars.take_compiled()
        end = self._clock() + _RELEASE_SECONDS
        while self._compiled:
            grammar = self._compiled[0]
            for request in list(grammar.requests):
                if self._clock() > end:
                    return
                try:
                    self._constrain(request, grammar)
                except RejectedError as error:
                    yield request, error
                else:
                    self._grammars.leave(grammar, request)
                    yield request, None
            self._compiled.popleft()

    def prepare(self, batch: Batch) -> None:
        """Have the first masks of requests that start written, if that takes long. `advance` begins later ones."""
        for event in batch.events:
            if event.type is EventType.SCHEDULED and event.request.constraint is not None:
                self._masks.prepare(event.request.constraint)

    def advance(self, taken: Iterable[tuple[Request, list[int]]]) -> None:
        """Have the next masks written for constrained requests that have taken these spans, if that takes long.

        Forced tokens count as output here: with the sampled one they are computed as a chunk, which is no decode.
        """
        for request, span in taken:
            if len(span) > 1:
                self._admission.decoded(len(span))
            if request.constraint is not None and not request.is_finished:
                self._masks.prepare(request.constraint)

    def is_at_fault(self, request: Request) -> bool:
        """Return True if a request failed since its own constraint did."""
        constraint = request.constraint
        return constraint is not None and constraint.wait(0.0) and constraint.error is not None

    def end(self, request: Request) -> None:
        """Take the constraint of a request that ends, whatever its state."""
        grammar = self._grammar_of.pop(request, None)
        if self._grammars is None or grammar is None:
            return
        if request.constraint is None:
            self._grammars.leave(grammar, request)
        else:
            self._grammars.give_back(grammar, request.constraint)
        self._grammars.kept.release(grammar)

    def evict(self) -> None:
        """Give back the memory that is kept for later requests."""
        if self._grammars is not None:
            self._grammars.kept.drop_all()

    def stop(self) -> bool:
        """End the threads; return False if one of them is in a call that takes too long and can't be interrupted."""
        has_written = self._masks.stop(_STOP_SECONDS)
        return (self._grammars is None or self._grammars.stop(_STOP_SECONDS)) and has_written

    def _constrain(self, request: Request, grammar: Grammar) -> None:
        assert self._grammars is not None
        if grammar.error is not None:
            raise _explained(grammar, grammar.error)
        constraint = self._grammars.constrain(grammar, self._limits.vocab_size, request.stop.token_ids)
        if request.message.generated_token_ids:
            try:
                constraint.replay(request.message.generated_token_ids)
            except ValueError as error:
                raise RejectedError(str(error)) from None
        request.constraint = constraint


def _explained(grammar: Grammar, error: RejectedError) -> RejectedError:
    """Return the error of a request, which names its field if that is at fault."""
    is_at_fault = error.kind is ErrorKind.INVALID
    return type(error)(f"structured_outputs.{grammar.key[0]} can't be used: {error}" if is_at_fault else str(error))
