"""The engine's end of the process that compiles grammars, and of its workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from quire.engine_core.grammar.compile_protocol import HELLO, CompileJob, CompileReply
from quire.engine_core.grammar.tokenizer import GrammarTokenizer

_START_SECONDS = 30.0  # for the first word of a worker, which may come after the reading of a large tokenizer
_LEAST_SECONDS, _WALL_SECONDS = 10.0, 3.0  # to wait for a reply: this, and so many for each second of CPU time


class WorkerLostError(Exception):
    """A worker has ended for another reason than its job, or is stopped."""


class Worker:
    """A worker, which compiles one grammar at a time. It ends with `kill`, at the latest when this process does."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair()
        self._connection: Connection[bytes, bytes] = Connection(os.dup(self._socket.fileno()))
        self._is_known = False

    def start(self) -> None:
        """Wait until it is there. Raises WorkerLostError."""
        if not self._is_known and self._receive(_START_SECONDS) != HELLO:
            raise WorkerLostError
        self._is_known = True

    def compile(self, job: CompileJob) -> CompileReply:
        """Return the reply to a job. Raises WorkerLostError."""
        frame = msgspec.msgpack.encode(job)
        with suppress(OSError):  # its end says why
            self._connection.send_bytes(frame)
        try:
            return msgspec.msgpack.decode(
                self._receive(_LEAST_SECONDS + _WALL_SECONDS * job.seconds), type=CompileReply
            )
        except msgspec.DecodeError:  # of one that was killed while it wrote
            raise WorkerLostError from None

    def kill(self) -> None:
        """End it, from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and close the sockets."""
        self.kill()
        self._socket.close()
        self._connection.close()

    def _receive(self, seconds: float) -> bytes:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv_bytes()
        except (EOFError, OSError):
            pass
        raise WorkerLostError


class CompilerProcess:
    """Starts the process `compiler_process` when it is needed, and workers in it; on any thread."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start it if it does not run.

        It dies with the thread that calls this. Raises OSError if there is no room for another process, ModelError or
        ValueError if there is no model.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def open_worker(self) -> Worker:
        """Return a worker, which may not have started yet. Raises what `start` does."""
        self.start()
        worker = Worker()
        with worker.theirs, self._lock, suppress(OSError):  # of a process that has just died
            assert self._control is not None
            socket.send_fds(self._control, [b"w"], [worker.theirs.fileno()])
        return worker

    def stop(self) -> None:
        """End it, with its workers. Idempotent; it starts again when it is needed."""
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
                self._process = None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        eos = map(str, self._tokenizer.eos_token_ids())
        module = "quire.engine_core.grammar.compiler_process"
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid()), str(self._tokenizer.path), *eos],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, **one_thread},
                process_group=0,  # Ctrl-C is the engine's; a session would get as much CPU time as the engine's
            )
