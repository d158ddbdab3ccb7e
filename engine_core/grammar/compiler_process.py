"""The process that compiles grammars where it harms nobody: `python -m quire.engine_core.grammar.compiler_process`.

It reads the tokenizer once, and has one thread, so that it can fork workers that share it. Standard input is the
control socket, over which the engine sends one end of a socket for each worker that it wants. A worker lives as long
as the engine keeps the other end open. The kernel enforces its limits.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from quire.engine_core.grammar.compile_protocol import (
    HELLO,
    WORKER_BYTES,
    CompileJob,
    CompileReply,
    Trial,
    worker_stack_bytes,
)
from quire.engine_core.grammar.matching import build_matcher
from quire.engine_core.grammar.text import grammar_source
from quire.engine_core.grammar.vocabulary import read_vocabulary
from quire.kernels._native import Constraint, Vocabulary
from quire.protocol.grammar.explanation import explained
from quire.protocol.messages import StructuredOutputs
from quire.protocol.parent_death import end_with_parent
from quire.protocol.process_limits import limit_process, memory_in_use
from quire.protocol.resident_memory import heap_bytes

_NICE = 10  # of workers: what runs goes first
_KEPT_BYTES = WORKER_BYTES // 4  # of memory that a worker may have taken and goes on: others have as much as before
_MAX_ERROR = 500  # characters
_FIRST_TOKENS = 1024  # that are asked about one by one
_QUICK_SECONDS = 0.02  # to compile a grammar; only the memory of slower ones is measured, which takes up to 15 ms
_QUICK_BYTES = 384 << 10, 128 << 10  # of a quick one's matcher, and of each constraint: most take less


def main() -> int:
    """Serve the engine: the command line has its process id, the path of tokenizer.json, and the eos tokens."""
    parent, path, *eos_token_ids = sys.argv[1:]
    end_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # rather these than the engine
    try:
        vocabulary = read_vocabulary(Path(path), [int(token) for token in eos_token_ids])
    except (OSError, ValueError, RuntimeError):  # the engine finds the same, and says it
        return 1
    _Workers(vocabulary).run()
    return 0


class _Workers:
    """Forks workers, kills those that the engine has left, and tells it how others ended."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._control = socket.socket(fileno=0)
        self._ends: dict[int, int] = {}  # of the workers' sockets, by process id
        self._poll = select.poll()

    def run(self) -> None:
        """Go on until the engine closes the control socket."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        while True:
            for file, _ in self._poll.poll():
                if file == woken:
                    os.read(woken, 4096)
                    self._reap()
                elif file != self._control.fileno():
                    self._kill(file)
                elif not self._fork():
                    return

    def _fork(self) -> bool:
        """Fork a worker for the next socket; return False if none will come."""
        _, ends, _, _ = socket.recv_fds(self._control, 1, 1)
        if not ends:
            return False
        [end] = ends
        own = os.getpid()
        try:
            process = os.fork()
        except OSError:  # the engine finds its socket closed
            os.close(end)
            return True
        if process == 0:
            _be_worker(own, end, self._vocabulary, [*self._ends.values()])
        self._ends[process] = end
        self._poll.register(end, 0)  # for POLLHUP alone: what is to be read is the worker's
        return True

    def _kill(self, end: int) -> None:
        self._poll.unregister(end)
        for process, of in self._ends.items():
            if of == end:
                os.kill(process, signal.SIGKILL)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                process, status = ended
                end = self._ends.pop(process)
                with suppress(KeyError):  # killed before
                    self._poll.unregister(end)
                _tell_end(end, os.waitstatus_to_exitcode(status))


def _tell_end(end: int, status: int) -> None:
    os.set_blocking(end, False)
    connection: Connection[bytes, bytes] = Connection(end)
    with suppress(OSError), connection:
        connection.send_bytes(msgspec.msgpack.encode(CompileReply(status=status, is_last=True)))


def _be_worker(parent: int, end: int, vocabulary: Vocabulary, others: list[int]) -> None:
    """Compile what comes over the socket, and end the process. `others` are the sockets of other workers."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2):
            os.dup2(nothing, file)
        for file in others:
            os.close(file)
        os.nice(_NICE)
        limit_process(memory=WORKER_BYTES, stack=worker_stack_bytes())
        connection: Connection[bytes, bytes] = Connection(end)
        connection.send_bytes(HELLO)
        most = memory_in_use() + _KEPT_BYTES
        while _answer(connection, vocabulary, most):
            pass
        status = 0
    except (EOFError, ConnectionError):  # the engine has closed it, or is gone
        status = 0
    finally:
        os._exit(status)


def _answer(connection: Connection[bytes, bytes], vocabulary: Vocabulary, most: int) -> bool:
    """Answer the next job; return False if it is the last one: the worker has kept more memory than `most`."""
    frame = connection.recv_bytes()
    begun = time.process_time()
    job = msgspec.msgpack.decode(frame, type=CompileJob)
    signal.setitimer(signal.ITIMER_PROF, max(job.seconds, 1e-6))
    reply = _reply(job, vocabulary)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if time.process_time() - begun > job.seconds:
        reply = CompileReply(status=-signal.SIGPROF)
    is_last = memory_in_use() > most
    connection.send_bytes(msgspec.msgpack.encode(msgspec.structs.replace(reply, is_last=is_last)))
    return not is_last


def _reply(job: CompileJob, vocabulary: Vocabulary) -> CompileReply:
    try:
        trial = _try(job.structured, vocabulary)
    except MemoryError:
        return CompileReply(status=-signal.SIGABRT)
    except Exception as error:  # noqa: BLE001 - whatever it is, the request has to be answered
        words = explained(str(error), job.structured.grammar)
        return CompileReply(error=words[:_MAX_ERROR] or type(error).__name__)
    return CompileReply(trial=trial)


def _try(structured: StructuredOutputs, vocabulary: Vocabulary) -> Trial:
    """Compile a grammar, use it and drop it, since what ends it recurses too. Raises ValueError."""
    begun = time.process_time()
    source = grammar_source(structured)
    matcher = build_matcher(vocabulary, source)
    constraint = Constraint(matcher, vocabulary.num_tokens, [])
    _use(constraint, vocabulary.num_tokens)
    if time.process_time() - begun < _QUICK_SECONDS:
        return Trial(source, *_QUICK_BYTES)
    with_both = heap_bytes()
    del constraint
    with_matcher = heap_bytes()
    del matcher
    return Trial(source, with_matcher - heap_bytes(), with_both - with_matcher)


def _use(constraint: Constraint, num_tokens: int) -> None:
    """Do what the engine does with a constraint for its first token. Raises ValueError if it cannot go on then."""
    constraint.begin_mask()
    constraint.write_mask()
    if not constraint.has_ended:
        constraint.follow(_next_token(constraint, num_tokens))
    if constraint.error is not None:
        raise ValueError(constraint.error)
    constraint.restart()


def _next_token(constraint: Constraint, num_tokens: int) -> int:
    """Return a token that may come next: one of the first, else of a list, which is short where those are banned."""
    if constraint.forced:
        return constraint.forced[0]
    first = next(filter(constraint.allows, range(min(num_tokens, _FIRST_TOKENS))), None)
    return constraint.mask.token_ids[0] if first is None else first


if __name__ == "__main__":
    sys.exit(main())
