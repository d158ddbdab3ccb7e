"""Grammars, compiled on threads of their own, and kept for later requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from quire.engine_core.grammar.compile_threads import CompileThreads, MatcherCompiler
from quire.engine_core.grammar.grammar import Grammar, grammar_key
from quire.engine_core.grammar.kept_grammars import KeptGrammars
from quire.engine_core.request import Request, TenantName
from quire.kernels.runner import Constraint
from quire.protocol.messages import ErrorKind, StructuredOutputs

MAX_GRAMMARS = 256  # that are kept


class Grammars:
    """Has grammars compiled, and makes constraints of them. One loop calls it."""

    def __init__(
        self, compiler: MatcherCompiler, *, wake: Callable[[], None] = lambda: None, most_bytes: float = math.inf
    ) -> None:
        """`wake` is called on another thread when `take_compiled` has something to return.

        `most_bytes` of memory may be taken by all grammars, with the constraints that wait for later requests.
        """
        self.kept = KeptGrammars(most_bytes)
        self._threads = CompileThreads(compiler, self.kept.make_room, wake)
        self._pending: set[Grammar] = set()

    @property
    def is_compiling(self) -> bool:
        """True if `take_compiled` may have something to return, now or later."""
        return bool(self._pending)

    def find(self, structured: StructuredOutputs, tenant: TenantName = b"") -> Grammar:
        """Return the grammar; begin to compile it for this tenant if it is new."""
        key = grammar_key(structured)
        grammar = self.kept.find(key)
        if grammar is None:
            grammar = Grammar(key, structured)
            self.kept.add(grammar)
            self._pending.add(grammar)
        if not grammar.is_ready:
            self._threads.begin(tenant, grammar)
        return grammar

    def constrain(self, grammar: Grammar, vocab_size: int, stop_token_ids: Collection[int]) -> Constraint:
        """Return a constraint at the start of a compiled grammar: a spare one, if there is one."""
        stops = sorted(stop_token_ids)
        spare = self.kept.take_spare(grammar)
        if spare is not None and spare.restart():
            spare.stop_at(stops)
            return spare
        assert grammar.matcher is not None
        return Constraint(grammar.matcher, vocab_size, stops)

    def give_back(self, grammar: Grammar, constraint: Constraint) -> None:
        """Keep a constraint for another request: what it has learned of the grammar makes it faster than a new one.

        The last one given back is used first, so that few of them grow large.
        """
        self.kept.add_spare(grammar, constraint)

    def leave(self, grammar: Grammar, request: Request) -> None:
        """Note that a request no longer waits for a grammar. One for which none waits is not compiled any further."""
        del grammar.requests[request]
        if not grammar.requests and grammar in self._pending:
            self._threads.leave(grammar)
            self._pending.discard(grammar)
            self.kept.drop(grammar)

    def take_compiled(self) -> list[Grammar]:
        """Return the grammars that have been compiled, or have failed, since the last call."""
        done = [outcome for outcome in self._threads.take_done() if outcome.grammar in self._pending]
        for outcome in done:
            outcome.grammar.matcher, outcome.grammar.error = outcome.matcher, outcome.error
            self._pending.discard(outcome.grammar)
            if outcome.error is not None and outcome.error.kind is not ErrorKind.INVALID:
                self.kept.drop(outcome.grammar)  # which may succeed later
        self.kept.limit(MAX_GRAMMARS + len(self._pending))
        return [outcome.grammar for outcome in done]

    def stop(self, seconds: float) -> bool:
        """Compile nothing any more; return True if all threads end within `seconds`."""
        return self._threads.stop(seconds)
