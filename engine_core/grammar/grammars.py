"""Grammars, compiled within a time limit on a thread of their own, and kept for later requests."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial

from quire.engine_core.grammar.forced_text import MAX_FORCED, longest_forced_text, without_forcing
from quire.engine_core.grammar.text import grammar_source, grammar_text
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.engine_core.request import Request
from quire.kernels.runner import Constraint, Matcher
from quire.protocol.messages import StructuredOutputs

MAX_GRAMMARS = 256  # that are kept
_MAX_SPARES = 256  # constraints, of 50 to 100 KiB
_MAX_FOLLOWED = 32_768  # tokens by one spare constraint; each may have left a KiB of lexer states
_MAX_ALL_FOLLOWED = 262_144  # tokens by all spare constraints
_MAX_ERROR = 500  # characters of a grammar's error
_NICE = 10  # of the threads that compile: what runs goes first
_MAX_STUCK = 4  # threads whose grammar takes too long, before other grammars have to wait for one of them

Key = tuple[str, str, bool, str | None]
Compile = Callable[[StructuredOutputs], Matcher]


class Grammar:
    """One grammar, from when it is first asked for. Compiled, it has a `matcher` at its start, or an `error`."""

    def __init__(self, key: Key, structured: StructuredOutputs, identity: int) -> None:
        """`identity`: that of the request which first asks for it."""
        self.key = key
        self.identity = identity
        self.structured = structured
        self.requests: dict[Request, None] = {}  # that wait for it
        self.matcher: Matcher | None = None
        self.error: str | None = None

    @property
    def is_ready(self) -> bool:
        """True once it is compiled, or has failed."""
        return self.matcher is not None or self.error is not None


class Grammars:
    """Compiles grammars, and makes constraints of them. One loop calls it; other threads only compile, one at a time.

    llguidance can't be interrupted: a thread whose grammar takes longer than `timeout` seconds is left to itself, and
    another one takes its place.
    """

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        *,
        timeout: float,
        wake: Callable[[], None] = lambda: None,
        compile_grammar: Compile | None = None,
        on_compile: Callable[[int], None] = lambda _identity: None,
    ) -> None:
        """`wake` is called on another thread when `take_compiled` has something to return.

        `on_compile` is called there with the identity of the request whose grammar is being compiled, 0 for none.
        """
        self._timeout = timeout
        self._on_compile = on_compile
        self._wake = wake
        self._compile = compile_grammar or partial(compile_matcher, tokenizer)
        self._kept: OrderedDict[Key, Grammar] = OrderedDict()
        self._spares: dict[Constraint, Grammar] = {}  # in order of their return
        self._num_followed = 0  # tokens that the spare constraints have followed
        self._pending: set[Grammar] = set()
        self._lock = threading.Lock()  # guards the attributes below
        self._queue: dict[Grammar, float] = {}  # with the time of its queueing
        self._done: list[tuple[Grammar, Matcher | None, str | None]] = []
        self._running: Grammar | None = None
        self._begun = 0.0
        self._has_thread = False
        self._threads: set[threading.Thread] = set()
        self._num_stuck = 0

    @property
    def is_compiling(self) -> bool:
        """True if `take_compiled` may have something to return, now or later."""
        return bool(self._pending)

    def find(self, structured: StructuredOutputs, identity: int = 0) -> Grammar:
        """Return the grammar, for the request of this identity; begin to compile it if it is new."""
        kind = structured.kinds[0]
        key = kind, grammar_text(structured), structured.disable_any_whitespace, structured.whitespace_pattern
        grammar = self._kept.get(key)
        if grammar is None:
            grammar = self._kept[key] = Grammar(key, structured, identity)
            self._begin(grammar)
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
        """Note that a request no longer waits for a grammar. One for which none waits is not compiled, if queued."""
        del grammar.requests[request]
        if grammar.requests:
            return
        with self._lock:
            is_queued = grammar in self._queue
            self._queue.pop(grammar, None)
        if is_queued:
            self._forget(grammar)

    def take_compiled(self) -> list[Grammar]:
        """Return the grammars that have been compiled, or have failed, since the last call."""
        with self._lock:
            done, self._done = self._done, []
            late = self._take_late()
        for grammar, matcher, error in done:
            grammar.matcher, grammar.error = matcher, error
            self._pending.discard(grammar)
        for grammar in late:
            grammar.error = self._took_too_long
            self._forget(grammar)
        if self._pending:
            self._ensure_thread()
        self._forget_oldest()
        return [grammar for grammar, _, _ in done] + late

    def stop(self, seconds: float) -> bool:
        """Begin with no other grammar; return True if all threads end within `seconds`."""
        with self._lock:
            self._queue.clear()
            threads = list(self._threads)
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _begin(self, grammar: Grammar) -> None:
        self._pending.add(grammar)
        with self._lock:
            self._queue[grammar] = time.monotonic()
        self._ensure_thread()

    def _forget(self, grammar: Grammar) -> None:
        self._pending.discard(grammar)
        self._kept.pop(grammar.key, None)

    def _forget_oldest(self) -> None:
        while len(self._kept) > MAX_GRAMMARS + len(self._pending):
            self._forget(next(grammar for grammar in self._kept.values() if grammar.is_ready))

    def _take_late(self) -> list[Grammar]:
        """Return the grammar that is being compiled if it takes too long; its thread is left to itself.

        When no thread is left to begin with them, queued grammars that have waited for as long are returned too.
        """
        now, late = time.monotonic(), list[Grammar]()
        if self._running is not None and now - self._begun > self._timeout:
            late.append(self._running)
            self._running, self._has_thread = None, False
            self._num_stuck += 1
        if self._num_stuck >= _MAX_STUCK and not self._has_thread:
            late += [grammar for grammar, since in self._queue.items() if now - since > self._timeout]
            self._queue = {grammar: since for grammar, since in self._queue.items() if grammar not in late}
        return late

    @property
    def _took_too_long(self) -> str:
        return (
            f"it takes longer than the {self._timeout:g} s that are allowed to compile it; make it simpler, or start "
            "the engine with a longer --grammar-timeout"
        )

    # On the compiling threads

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._has_thread or not self._queue or self._num_stuck >= _MAX_STUCK:
                return
            self._has_thread = True
            thread = threading.Thread(target=self._run, name="quire-grammars", daemon=True)
            self._threads = {thread, *(each for each in self._threads if each.is_alive())}
        thread.start()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux
        while (grammar := self._next()) is not None:
            begun = time.monotonic()
            self._on_compile(grammar.identity)
            matcher, error = self._outcome(grammar)
            self._on_compile(0)
            if time.monotonic() - begun > self._timeout:
                matcher, error = None, self._took_too_long
            with self._lock:
                is_late = self._running is not grammar
                if is_late:
                    self._num_stuck -= 1
                else:
                    self._running = None
                    self._done.append((grammar, matcher, error))
            self._wake()
            if is_late:
                return

    def _next(self) -> Grammar | None:
        with self._lock:
            self._running = next(iter(self._queue), None)
            if self._running is None:
                self._has_thread = False
            else:
                del self._queue[self._running]
                self._begun = time.monotonic()
            return self._running

    def _outcome(self, grammar: Grammar) -> tuple[Matcher | None, str | None]:
        try:
            return self._compile(grammar.structured), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the request has to be answered
            return None, str(error)[:_MAX_ERROR] or type(error).__name__


def compile_matcher(tokenizer: GrammarTokenizer, structured: StructuredOutputs) -> Matcher:
    """Compile a grammar. Raises ValueError if it is wrong, or allows no text at all.

    One that may force a text of more than `MAX_FORCED` characters forces none.
    """
    source = grammar_source(structured)
    if longest_forced_text(*source) > MAX_FORCED:
        source = without_forcing(*source)
    matcher = Matcher(tokenizer.get(), *source)
    if (words := matcher.error) is None and not matcher.allows_any():
        words = matcher.error or "NoExtension"
    if words is not None:
        raise ValueError("it allows no text" if words.startswith("NoExtension") else words)
    return matcher
