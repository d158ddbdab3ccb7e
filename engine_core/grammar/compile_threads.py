"""The engine's threads that compile grammars, for tenants in turn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.engine_core.grammar.compile_protocol import ENGINE_STACK_BYTES, Trial
from quire.engine_core.grammar.compile_turns import CompileTurns
from quire.engine_core.grammar.grammar import Compilation, Grammar
from quire.engine_core.request import TenantName
from quire.engine_core.validation import RejectedError
from quire.kernels.runner import Matcher

MAX_THREADS = 4  # each compiles one grammar at a time
_MAX_ERROR = 500  # characters of a grammar's error
_NICE = 10  # of the threads: what runs goes first


class MatcherCompiler(Protocol):
    """Compiles grammars on any thread, in two steps: where that harms nobody, and then in this process."""

    def start(self) -> None:
        """Begin to prepare for the first grammar; on a thread that lives as long as the engine."""

    def try_out(self, compilation: Compilation) -> Trial:
        """Compile a grammar there. Raises ValueError for a wrong or too costly one, or TransientError."""

    def build(self, trial: Trial) -> Matcher:
        """Return the matcher. Raises ValueError."""

    def stop(self) -> None:
        """End what it has started."""


@dataclass(frozen=True)
class CompileOutcome:
    """The result of a compilation: a matcher or an error."""

    grammar: Grammar
    matcher: Matcher | None = None
    error: RejectedError | None = None


class CompileThreads:
    """Up to `MAX_THREADS` threads, which start when they are needed. One loop calls this; the threads only compile."""

    def __init__(
        self, compiler: MatcherCompiler, make_room: Callable[[Grammar, Trial], None], wake: Callable[[], None]
    ) -> None:
        """Both functions are called on other threads.

        `make_room` before a matcher is built, for which it raises RejectedError if there is no memory; `wake` when
        `take_done` has something to return.
        """
        self._compiler = compiler
        self._make_room = make_room
        self._wake = wake
        self._changed = threading.Condition()  # guards the attributes below
        self._turns = CompileTurns(MAX_THREADS)
        self._done: list[CompileOutcome] = []
        self._num_idle = 0
        self._is_stopped = False
        self._threads: list[threading.Thread] = []

    def begin(self, tenant: TenantName, grammar: Grammar) -> None:
        """Have a grammar compiled when it is the tenant's turn, or that of another one that has asked for it before."""
        self._compiler.start()
        with self._changed:
            if any(outcome.grammar is grammar for outcome in self._done):
                return
            self._turns.add(tenant, grammar)
            self._changed.notify()
            is_short = not self._num_idle and len(self._threads) < MAX_THREADS
        if is_short:
            self._start_thread()

    def leave(self, grammar: Grammar) -> None:
        """Compile a grammar no longer, for which nobody waits."""
        with self._changed:
            self._turns.remove(grammar)
        grammar.compilation.cancel()

    def take_done(self) -> list[CompileOutcome]:
        """Return what has been compiled, or has failed, since the last call."""
        with self._changed:
            done, self._done = self._done, []
        return done

    def stop(self, seconds: float) -> bool:
        """End the threads and what compiles; return False if one is still compiling after `seconds`."""
        with self._changed:
            self._is_stopped = True
            running = self._turns.clear()
            self._changed.notify_all()
        for grammar in running:
            grammar.compilation.cancel()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._compiler.stop()
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="quire-grammars", daemon=True)
        self._threads.append(thread)
        others = threading.stack_size(ENGINE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(others)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux
        while (grammar := self._next()) is not None:
            outcome = self._outcome(grammar)
            with self._changed:
                self._turns.end(grammar)
                self._done.append(outcome)
                self._changed.notify()  # its tenant may have another one
            self._wake()

    def _next(self) -> Grammar | None:
        with self._changed:
            while not self._is_stopped:
                if (grammar := self._turns.take()) is not None:
                    return grammar
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            return None

    def _outcome(self, grammar: Grammar) -> CompileOutcome:
        try:
            trial = self._compiler.try_out(grammar.compilation)
            self._make_room(grammar, trial)
            return CompileOutcome(grammar, matcher=self._compiler.build(trial))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request has to be answered
            words = str(error)[:_MAX_ERROR] or type(error).__name__
            kind = type(error) if isinstance(error, RejectedError) else RejectedError
            return CompileOutcome(grammar, error=kind(words))
