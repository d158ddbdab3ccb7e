"""Compiles grammars: in a worker first, whose death harms nobody, and then in this process.

llguidance recurses over the rules of a grammar and can't be interrupted. What a worker has compiled, used and dropped
on its small stack is compiled again on a much larger one here, and used on threads whose stacks are larger too.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections import OrderedDict
from contextlib import suppress

import msgspec

from quire.engine_core.grammar.compile_protocol import WORKER_BYTES, CompileJob, CompileReply, Trial, worker_stack_bytes
from quire.engine_core.grammar.grammar import Compilation, TransientError
from quire.engine_core.grammar.matching import build_matcher
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.engine_core.grammar.worker import CompilerProcess, Worker, WorkerLostError
from quire.kernels.errors import ModelError
from quire.kernels.runner import Matcher

_MAX_REFUSED = 4096  # texts that are remembered since they ended a worker
_TRIES = 3  # if the worker is lost, and then the process that starts workers
_OF_ITS_OWN = {-each for each in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGPROF)}


class GrammarCompiler:
    """Compiles for several threads at once, each of which has a worker of its own meanwhile."""

    def __init__(self, tokenizer: GrammarTokenizer, *, seconds: float) -> None:
        """`seconds` of CPU time are allowed for a grammar."""
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._process = CompilerProcess(tokenizer)
        self._lock = threading.Lock()  # guards the attributes below
        self._idle: list[Worker] = []
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # errors by the digest of a text

    def preload(self) -> None:
        """Begin to read the tokenizer, here and where workers share it; on the thread that `start` wants."""
        self.start()
        self._tokenizer.preload()

    def start(self) -> None:
        """Start a process and a worker, without waiting for them; on a thread that lives as long as the engine."""
        with suppress(OSError, ValueError, ModelError):  # `compile` will raise it
            self._process.start()
            if not self._idle:
                self._idle.append(self._process.open_worker())

    def stop(self) -> None:
        """End the processes."""
        self._close_idle()
        self._process.stop()

    def try_out(self, compilation: Compilation) -> Trial:
        """Compile a grammar in a worker. Raises ValueError for a wrong or too costly one, or TransientError."""
        self._tokenizer.get()  # the worker has it too, and cannot say what is wrong with it
        digest = hashlib.blake2b(msgspec.msgpack.encode(compilation.structured), digest_size=16).digest()
        with self._lock:
            refused = self._refused.get(digest)
        if refused is not None:
            raise ValueError(refused)
        reply = self._try(compilation)
        if reply.trial is not None:
            return reply.trial
        if reply.error is not None:
            raise ValueError(reply.error)
        words = self._explain(reply.status)
        with self._lock:
            self._refused[digest] = words
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
        raise ValueError(words)

    def build(self, trial: Trial) -> Matcher:
        """Compile here what a worker has compiled before."""
        return build_matcher(self._tokenizer.get(), trial.source)

    def _try(self, compilation: Compilation) -> CompileReply:
        """Return the reply of a worker. One that is lost for other reasons than the grammar's gets a successor.

        Raises TransientError if there is no reply.
        """
        reply: CompileReply | None = None
        for _ in range(_TRIES):
            if compilation.is_cancelled:
                raise ValueError("nobody waits for it any more")
            with suppress(WorkerLostError):
                reply = self._reply(compilation)
                if reply.status == 0 or reply.status in _OF_ITS_OWN:
                    return reply
            self._close_idle()  # perhaps they have been killed as well
        if reply is None or reply.status == -signal.SIGKILL:  # which no grammar causes
            raise TransientError("the processes that were to compile it have ended or stopped; send it again")
        return reply

    def _reply(self, compilation: Compilation) -> CompileReply:
        worker = self._take()
        compilation.attach(worker)
        is_kept = False
        try:
            reply = worker.compile(CompileJob(compilation.structured, self._seconds))
            is_kept = not reply.is_last and reply.status in (0, -signal.SIGPROF)
            return reply
        finally:
            compilation.attach(None)
            if is_kept:
                with self._lock:
                    self._idle.append(worker)
            else:
                worker.close()

    def _take(self) -> Worker:
        """Return the worker that was idle last, whose caches are warm, or a new one. Raises WorkerLostError."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        try:
            worker = worker or self._process.open_worker()
        except OSError as error:
            raise TransientError(
                f"no process could be started to compile it: {error.strerror}; send it again"
            ) from None
        try:
            worker.start()
        except WorkerLostError:
            worker.close()
            self._process.stop()  # it may itself have been stopped
            raise
        return worker

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    def _explain(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return (
                f"it takes longer than the {self._seconds:g} s that are allowed to compile it; make it simpler, or "
                "start the engine with a longer --grammar-timeout"
            )
        return (
            f"compiling it takes more than the {worker_stack_bytes()} bytes of stack or the {WORKER_BYTES} bytes of "
            "memory that are allowed; make it simpler, with shorter chains of rules or references that lead to others"
        )
