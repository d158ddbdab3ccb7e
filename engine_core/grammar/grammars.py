"""Grammars, compiled on threads of their own, and kept for later requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from quire.engine_core.grammar.compile_threads import CompileThreads, MatcherCompiler
from quire.engine_core.grammar.grammar import Grammar, GrammarKey, grammar_key
from quire.engine_core.request import Request, TenantName
from quire.kernels.runner import Constraint
from quire.protocol.messages import StructuredOutputs

MAX_GRAMMARS = 256  # that are kept
_MAX_SPARES = 256  # constraints, of 50 to 100 KiB
_MAX_FOLLOWED = 32_768  # tokens by one spare constraint; each may have left a KiB of lexer states
_MAX_ALL_FOLLOWED = 262_144  # tokens by all spare constraints


class Grammars:
    """Has grammars compiled, and makes constraints of them. One loop calls it."""

    def __init__(self, compiler: MatcherCompiler, *, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called on another thread when `take_compiled` has something to return."""
        self._threads = CompileThreads(compiler, wake)
        self._kept: OrderedDict[GrammarKey, Grammar] = OrderedDict()
        self._spares: dict[Constraint, Grammar] = {}  # in order of their return
        self._num_followed = 0  # tokens that the spare constraints have followed
        self._pending: set[Grammar] = set()

    @property
    def is_compiling(self) -> bool:
        """True if `take_compiled` may have something to return, now or later."""
        return bool(self._pending)

    def find(self, structured: StructuredOutputs, tenant: TenantName = b"") -> Grammar:
        """Return the grammar; begin to compile it for this tenant if it is new."""
        key = grammar_key(structured)
        grammar = self._kept.get(key)
        if grammar is None:
            grammar = self._kept[key] = Grammar(key, structured)
            self._pending.add(grammar)
        if not grammar.is_ready:
            self._threads.begin(tenant, grammar)
        self._kept.move_to_end(key)
        return grammar

    def constrain(self, grammar: Grammar, vocab_size: int, stop_token_ids: Collection[int]) -> Constraint:
        """Return a constraint at the start of a compiled grammar: a spare one, if there is one."""
        stops = sorted(stop_token_ids)
        spare = next((each for each, of in reversed(self._spares.items()) if of is grammar), None)
        if spare is not None:
            self._take_spare(spare)
            if spare.restart():
                spare.stop_at(stops)
                return spare
        assert grammar.matcher is not None
        return Constraint(grammar.matcher, vocab_size, stops)

    def give_back(self, grammar: Grammar, constraint: Constraint) -> None:
        """Keep a constraint for another request: what it has learned of the grammar makes it faster than a new one.

        The last one given back is used first, so that few of them grow large. The oldest are dropped first.
        """
        if constraint.num_followed > _MAX_FOLLOWED:
            return
        self._spares[constraint] = grammar
        self._num_followed += constraint.num_followed
        while len(self._spares) > _MAX_SPARES or self._num_followed > _MAX_ALL_FOLLOWED:
            self._take_spare(next(iter(self._spares)))

    def evict(self) -> None:
        """Drop the spare constraints, and all grammars that are ready; those in use end with their requests."""
        self._spares.clear()
        self._num_followed = 0
        for grammar in [grammar for grammar in self._kept.values() if grammar.is_ready]:
            self._forget(grammar)

    def _take_spare(self, spare: Constraint) -> None:
        del self._spares[spare]
        self._num_followed -= spare.num_followed

    def leave(self, grammar: Grammar, request: Request) -> None:
        """Note that a request no longer waits for a grammar. One for which none waits is not compiled any further."""
        del grammar.requests[request]
        if not grammar.requests and grammar in self._pending:
            self._threads.leave(grammar)
            self._forget(grammar)

    def take_compiled(self) -> list[Grammar]:
        """Return the grammars that have been compiled, or have failed, since the last call."""
        done = [outcome for outcome in self._threads.take_done() if outcome.grammar in self._pending]
        for outcome in done:
            outcome.grammar.matcher, outcome.grammar.error = outcome.matcher, outcome.error
            self._pending.discard(outcome.grammar)
            if outcome.is_transient:
                self._forget(outcome.grammar)
        while len(self._kept) > MAX_GRAMMARS + len(self._pending):
            self._forget(next(grammar for grammar in self._kept.values() if grammar.is_ready))
        return [outcome.grammar for outcome in done]

    def stop(self, seconds: float) -> bool:
        """Compile nothing any more; return True if all threads end within `seconds`."""
        return self._threads.stop(seconds)

    def _forget(self, grammar: Grammar) -> None:
        self._pending.discard(grammar)
        self._kept.pop(grammar.key, None)
