"""The grammars and constraints that are kept for later requests, within a bound of memory."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

from quire.engine_core.grammar.compile_protocol import Trial
from quire.engine_core.grammar.grammar import Grammar, GrammarKey
from quire.engine_core.validation import OverloadedError, RejectedError
from quire.kernels.runner import Constraint

_MAX_SPARES = 256  # constraints
_MAX_FOLLOWED = 32_768  # tokens by one spare constraint; each may have left a KiB of lexer states
_MAX_ALL_FOLLOWED = 262_144  # tokens by all spare constraints


class KeptGrammars:
    """Grammars, those used least recently first, and their spare constraints. Any thread may call it.

    Those that open requests hold count until these end; the others make room for new ones.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        """`most_bytes` of memory may be taken by all grammars and the spare constraints."""
        self._most_bytes = most_bytes
        self._lock = threading.RLock()
        self._grammars: OrderedDict[GrammarKey, Grammar] = OrderedDict()
        self._held: Counter[Grammar] = Counter()  # by how many requests
        self._spares: dict[Constraint, Grammar] = {}  # in order of their return
        self._num_followed = 0  # tokens that the spare constraints have followed

    @property
    def num_bytes(self) -> int:
        """Memory of all grammars that are kept or held, and of the spare constraints."""
        with self._lock:
            return _bytes_of(self._all()) + sum(each.constraint_bytes for each in self._spares.values())

    def find(self, key: GrammarKey) -> Grammar | None:
        """Return a grammar, which is now the one used last."""
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
            return self._grammars.get(key)

    def add(self, grammar: Grammar) -> None:
        """Keep a grammar, which has yet to be compiled."""
        with self._lock:
            self._grammars[grammar.key] = grammar

    def limit(self, count: int) -> None:
        """Drop the oldest grammars until there are no more than `count`."""
        with self._lock:
            ready = [each for each in self._grammars.values() if each.is_ready]
            for grammar in ready[: max(0, len(self._grammars) - count)]:
                self.drop(grammar)

    def drop(self, grammar: Grammar) -> int:
        """Keep a grammar no longer than requests hold it, and no spare constraint; return its bytes and theirs."""
        with self._lock:
            if self._grammars.get(grammar.key) is grammar:
                del self._grammars[grammar.key]
            spares = [spare for spare, of in self._spares.items() if of is grammar]
            return grammar.num_bytes + sum(map(self._drop_spare, spares))

    def drop_all(self) -> None:
        """Drop the spare constraints, and all grammars that are ready."""
        with self._lock:
            for grammar in [each for each in self._grammars.values() if each.is_ready]:
                self.drop(grammar)

    def hold(self, grammar: Grammar) -> None:
        """Count a request that waits for a grammar, or follows it."""
        with self._lock:
            self._held[grammar] += 1

    def release(self, grammar: Grammar) -> None:
        """Count such a request no longer."""
        with self._lock:
            self._held[grammar] -= 1
            if not self._held[grammar]:
                del self._held[grammar]

    def make_room(self, grammar: Grammar, trial: Trial) -> None:
        """Drop what was used least recently until there is memory for a grammar that is about to be compiled.

        Raises OverloadedError if there is none before requests have ended, RejectedError if there never is.
        """
        needed = trial.matcher_bytes + trial.constraint_bytes
        if needed > self._most_bytes:
            raise RejectedError(
                f"it takes {needed} bytes of memory, and all grammars together may take {self._most_bytes}; make it "
                "simpler, or start the engine with a higher --memory-limit"
            )
        with self._lock:
            unheld = [each for each in self._grammars.values() if each.is_ready and each not in self._held]
            held_bytes = _bytes_of(self._all().difference(unheld))
            if held_bytes + needed > self._most_bytes:
                raise OverloadedError(
                    f"the engine is overloaded: the request's grammar takes {needed} bytes of memory, those of open "
                    f"requests take {held_bytes}, and {self._most_bytes} are allowed; try again later, or start the "
                    "engine with a higher --memory-limit"
                )
            excess = self.num_bytes + needed - self._most_bytes
            while excess > 0 and unheld:
                excess -= self.drop(unheld.pop(0))
            while excess > 0 and self._spares:
                excess -= self._drop_spare(next(iter(self._spares)))
            grammar.num_bytes, grammar.constraint_bytes = needed, trial.constraint_bytes

    def take_spare(self, grammar: Grammar) -> Constraint | None:
        """Return the spare constraint of a grammar that was added last, None if it has none."""
        with self._lock:
            spare = next((each for each, of in reversed(self._spares.items()) if of is grammar), None)
            if spare is not None:
                self._drop_spare(spare)
            return spare

    def add_spare(self, grammar: Grammar, constraint: Constraint) -> None:
        """Keep a constraint, if its grammar is kept. The oldest are dropped first."""
        if constraint.num_followed > _MAX_FOLLOWED:
            return
        with self._lock:
            if self._grammars.get(grammar.key) is not grammar:
                return
            self._spares[constraint] = grammar
            self._num_followed += constraint.num_followed
            excess = self.num_bytes - self._most_bytes
            while self._spares and (
                excess > 0 or len(self._spares) > _MAX_SPARES or self._num_followed > _MAX_ALL_FOLLOWED
            ):
                excess -= self._drop_spare(next(iter(self._spares)))

    def _all(self) -> set[Grammar]:
        return {*self._grammars.values(), *self._held}

    def _drop_spare(self, spare: Constraint) -> int:
        self._num_followed -= spare.num_followed
        return self._spares.pop(spare).constraint_bytes


def _bytes_of(grammars: Iterable[Grammar]) -> int:
    return sum(each.num_bytes for each in grammars)
