"""One grammar, from when it is first asked for."""

from __future__ import annotations

import threading
from typing import Protocol

from quire.engine_core.grammar.text import grammar_text
from quire.engine_core.request import Request
from quire.engine_core.validation import RejectedError
from quire.kernels.runner import Matcher
from quire.protocol.messages import ErrorKind, StructuredOutputs

GrammarKey = tuple[str, str, bool, str | None]


class TransientError(RejectedError):
    """An error that is not the grammar's: none can be compiled now, and later it may succeed."""

    kind = ErrorKind.UNAVAILABLE


class Killable(Protocol):
    """A compilation that can be ended."""

    def kill(self) -> None:
        """End it, from any thread."""


class Compilation:
    """One compilation, which may be cancelled while something is busy with it."""

    def __init__(self, structured: StructuredOutputs) -> None:
        self.structured = structured
        self._lock = threading.Lock()
        self._worker: Killable | None = None
        self.is_cancelled = False

    def attach(self, worker: Killable | None) -> None:
        """Note what is busy with it, or that nothing is any more."""
        with self._lock:
            self._worker = worker
            if self.is_cancelled and worker is not None:
                worker.kill()

    def cancel(self) -> None:
        """End it as soon as possible."""
        with self._lock:
            self.is_cancelled = True
            if self._worker is not None:
                self._worker.kill()


class Grammar:
    """One grammar. Compiled, it has a `matcher` at its start, or an `error`.

    `num_bytes` of memory are its own, `constraint_bytes` those of each constraint, as far as they are known.
    """

    def __init__(self, key: GrammarKey, structured: StructuredOutputs) -> None:
        self.key = key
        self.compilation = Compilation(structured)
        self.requests: dict[Request, None] = {}  # that wait for it
        self.matcher: Matcher | None = None
        self.error: RejectedError | None = None
        self.num_bytes = self.constraint_bytes = 0

    @property
    def is_ready(self) -> bool:
        """True once it is compiled, or has failed."""
        return self.matcher is not None or self.error is not None


def grammar_key(structured: StructuredOutputs) -> GrammarKey:
    """Return what two requests with the same grammar have in common."""
    kind = structured.kinds[0]
    return kind, grammar_text(structured), structured.disable_any_whitespace, structured.whitespace_pattern
