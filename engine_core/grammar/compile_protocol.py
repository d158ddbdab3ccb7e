"""The messages between an engine and the workers that compile its grammars, and the limits of a worker.

Worker and engine share a socket, over which go frames of `multiprocessing.connection`. The worker says hello, then
answers one `CompileJob` after another with a `CompileReply`. When it dies, its parent writes the last one.
"""

from __future__ import annotations

import resource

import msgspec

from quire.engine_core.grammar.matching import GrammarSource
from quire.protocol.messages import StructuredOutputs

WORKER_BYTES = 256 << 20  # of memory, above what it has at its start
ENGINE_STACK_BYTES = 64 << 20  # of the engine's threads that compile, many times what a worker has
_WORKER_STACK_BYTES = 2 << 20
_LEAST_THREAD_BYTES = 2 << 20  # of a thread of glibc's, where the limit of a process's stack is infinite
HELLO = b"hello"


class CompileJob(msgspec.Struct, frozen=True):
    """A grammar, and the seconds of CPU time in which it must be compiled."""

    structured: StructuredOutputs
    seconds: float


class Trial(msgspec.Struct, frozen=True):
    """A source that compiles, and the bytes of memory that its matcher and each of its constraints take."""

    source: GrammarSource
    matcher_bytes: int = 0
    constraint_bytes: int = 0


class CompileReply(msgspec.Struct, frozen=True):
    """The result of a job: a successful trial, or an error, or else the way in which the worker ended.

    `status` is that of `subprocess.Popen.returncode`. A worker says SIGPROF itself if the job took too long and the
    kernel did not notice. `is_last` if the worker ends, in good order.
    """

    trial: Trial | None = None
    error: str | None = None
    status: int = 0
    is_last: bool = False


def worker_stack_bytes() -> int:
    """Return the stack of a worker: at most half of what any thread has that uses a compiled grammar."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    thread = _LEAST_THREAD_BYTES if soft == resource.RLIM_INFINITY else soft
    return min(_WORKER_STACK_BYTES, thread // 2)
