"""The process of an engine: started, watched, and ended without leaving anything behind."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import threading
import tty
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

import msgspec

from quire.frontend.errors import EngineDeadError, EngineStartError
from quire.protocol.log_limit import TokenBucket
from quire.protocol.messages import SchedulerStats

T = TypeVar("T")

_TAIL_CHARS = 4000
_CHARS_PER_SECOND = 100_000  # that are forwarded, after a burst of ten times as many; the engine bounds its own log
_ERROR = "error: "  # begins the line with the reason why an engine can't start


class EngineLog:
    """The log that forwards an engine's stderr to this process's, and keeps its tail.

    If the owner's stderr is a terminal, the engine's is one too, so that it shows progress. The error with which it
    fails to start is not shown, since it is raised.
    """

    def __init__(self) -> None:
        self._read_fd = -1
        self._tail = ""
        self._error = ""
        self._is_started = False
        self._budget = TokenBucket(_CHARS_PER_SECOND, 10 * _CHARS_PER_SECOND)
        self._num_left_out = 0

    @property
    def stderr_tail(self) -> str:
        """The end of the engine's stderr."""
        return self._tail.strip()

    @property
    def error(self) -> str:
        """The error with which the engine failed to start; empty if it did not fail."""
        return self._error.removeprefix(_ERROR).strip()

    def mark_started(self) -> None:
        """Show everything from now on."""
        self._is_started, self._error = True, ""

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open the file descriptor of the engine's stderr; it is closed here at the end of the `with`."""
        if sys.stderr is not None and sys.stderr.isatty():
            self._read_fd, write_fd = os.openpty()
            tty.setraw(write_fd)  # keeps newlines unchanged
        else:
            self._read_fd, write_fd = os.pipe()
        try:
            yield write_fd
        finally:
            os.close(write_fd)

    def forward(self) -> None:
        """Forward until the engine closes its end."""
        at_line_start, decoder = True, codecs.getincrementaldecoder("utf-8")("replace")
        try:
            # A terminal whose other end is closed returns EIO, not the end of the file.
            with suppress(OSError):
                while chunk := os.read(self._read_fd, 65536):
                    self._take(decoder.decode(chunk), at_line_start)
                    at_line_start = chunk.endswith(b"\n")
        finally:
            os.close(self._read_fd)

    def _take(self, text: str, at_line_start: bool) -> None:
        self._tail = (self._tail + text)[-_TAIL_CHARS:]
        if self._error:
            self._error = (self._error + text)[:_TAIL_CHARS]
            return
        found = -1 if self._is_started else _find_error(text, at_line_start)
        if found >= 0:
            text, self._error = text[:found], text[found:]
        self._show(text)

    def _show(self, text: str) -> None:
        if not self._budget.take(len(text)):
            self._num_left_out += len(text)
            return
        if self._num_left_out:
            show(f"\n[{self._num_left_out} characters of the engine's stderr were left out]\n")
            self._num_left_out = 0
        show(text)


def show(text: str) -> None:
    """Write to stderr, if anybody reads it."""
    if text and sys.stderr is not None:
        with suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write(text)
            sys.stderr.flush()


def _find_error(text: str, at_line_start: bool) -> int:
    """Return the start of the line that begins with `error: `, or -1."""
    if at_line_start and text.startswith(_ERROR):
        return 0
    found = text.find("\n" + _ERROR)
    return found + 1 if found >= 0 else -1


class Inherited(Protocol):
    """An owner of file descriptors that forked children of this process must not keep open."""

    def close_in_child(self) -> None:
        """Close them; in the child."""


closed_in_forks: weakref.WeakSet[Inherited] = weakref.WeakSet()
"""Such owners. A child that kept the stdin of a process that stands by would keep it waiting without its owner."""


def _close_in_child() -> None:
    for owner in list(closed_in_forks):
        with suppress(OSError):
            owner.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)

KILL_SECONDS = 10.0  # after which an engine that does not end is killed
_DUMP_SECONDS = 2.0  # for an engine that hangs to write its stacks


class Beat(msgspec.Struct):
    """A sign of life of an engine process, on its stdout every second: `BEAT` and this as JSON.

    `step_age`: seconds since a step ended, or since there is something to do; 0 while there is nothing.
    """

    step_age: float
    state: SchedulerStats


class Loaded(msgspec.Struct):
    """Facts about the model that an engine has loaded: what frontends know about it and keep."""

    text_files: dict[str, str]  # hash by name
    vocab_size: int
    eos_token_ids: list[int]


class ReloadCall(msgspec.Struct):
    """A client's call of `reload`, see `protocol.messages.Reload`; `number` identifies it in the answer."""

    number: int
    settings: dict[str, bool | int | float | str | None]
    drain_timeout: float


class EngineProcess:
    """One run of an engine in a process of its own; `wait_ready` waits until it can be used.

    It has no terminal, so that Ctrl-C reaches only its owner, and it ends by itself when its owner is gone.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        kept_fds: Sequence[int] = (),
        standby: str | None = None,
        on_reload: Callable[[ReloadCall], None] = lambda _call: None,
    ) -> None:
        """Start it with these flags of `python -m quire.engine_core`; it inherits `kept_fds` by their numbers.

        `standby`: it does nothing but load its "program", or its "model" too, until `begin` is called. `on_reload` is
        called on another thread.
        """
        self._owner = os.getpid()
        self._loaded: Future[Loaded] = Future()
        self._ready: Future[str] = Future()
        self._on_reload = on_reload
        self._log = EngineLog()
        self.ended = threading.Event()
        self.num_beats = 0
        self.last_beat: Beat | None = None
        # -P: folders in the current directory must not shadow packages.
        command = [sys.executable, "-P", "-m", "quire.engine_core", *flags, "--die-with-parent", str(self._owner)]
        command += [] if standby is None else ["--standby", standby]
        try:
            with self._log.open() as stderr:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    start_new_session=True,
                    pass_fds=kept_fds,
                )
        except OSError as error:
            raise EngineStartError(f"the engine process could not be started: {error}") from error
        self._watcher = threading.Thread(target=self._watch, name="quire-engine-watch", daemon=True)
        self._watcher.start()
        closed_in_forks.add(self)

    def close_in_child(self) -> None:
        """See `Inherited`."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self.ended.is_set() else None

    def begin(self) -> None:
        """Have a process that stands by go on. Without effect on one that has ended."""
        self._write(b"\n")

    def tell(self, word: str, **fields: object) -> None:
        """Send a line to a running engine, see engine_core/supervisor_link.py. Without effect on one that has ended."""
        self._write(f"{word} {msgspec.json.encode(fields).decode()}\n".encode())

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None  # PIPE
        with suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def wait_loaded(self, timeout: float) -> Loaded:
        """Wait until the engine has loaded its model. Raises `EngineStartError` with the engine's message."""
        return self._wait(self._loaded, timeout)

    def wait_ready(self, timeout: float) -> str:
        """Wait until the engine listens; return its address. Raises `EngineStartError` with the engine's message."""
        return self._wait(self._ready, timeout)

    def _wait(self, event: Future[T], timeout: float) -> T:
        try:
            return event.result(min(timeout, threading.TIMEOUT_MAX))
        except FutureTimeoutError:
            raise EngineStartError(
                f"the engine was not ready within {timeout:g} s; raise start_timeout\n{self._log.stderr_tail}"
            ) from None

    def exit_report(self) -> EngineDeadError:
        """Return how the process has ended, with its stderr tail."""
        status = self._process.wait()
        how = f"exited with status {status}"
        if status < 0:
            how = f"was killed by {_name_of(-status)}"
            if status == -signal.SIGKILL:
                how += " (manually, or because memory ran out)"
        tail = f"; the end of its stderr:\n{self._log.stderr_tail}" if self._log.stderr_tail else ""
        return EngineDeadError(f"the engine {how}", f"it was process {self.pid}{tail}")

    def stop(self, seconds: float) -> None:
        """Terminate the process, and kill it after `seconds`. Return when it is gone. Idempotent."""
        if os.getpid() != self._owner:
            return  # a forked child inherits the object, but does not own the engine
        try:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)  # it may be stopped, and would get SIGTERM only afterwards
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
        self._watcher.join(1.0)

    def interrupt(self) -> None:
        """Have the engine abort its requests, and end."""
        self._process.send_signal(signal.SIGINT)

    def abort(self) -> None:
        """End a process that hangs or is stopped; it gets some time to write the stacks of its threads."""
        self._process.send_signal(signal.SIGABRT)
        self._process.send_signal(signal.SIGCONT)  # a stopped process takes no other signal
        self.ended.wait(_DUMP_SECONDS)
        self._process.kill()
        self.ended.wait()

    def _watch(self) -> None:
        """Forward the engine's output until it ends; runs on a thread of its own."""
        reader = threading.Thread(target=self._log.forward, name="quire-engine-log", daemon=True)
        reader.start()
        assert self._process.stdout is not None  # PIPE
        with self._process.stdout as stdout:
            for line in stdout:
                with suppress(msgspec.DecodeError):
                    self._take(*line.decode(errors="replace").strip().partition(" ")[::2])
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        reader.join()
        self.ended.set()
        for event in (self._loaded, self._ready):
            if not event.done():
                event.set_exception(EngineStartError(self._start_failure()))

    def _take(self, word: str, rest: str) -> None:
        """Take a line of the engine."""
        if word == "READY" and not self._ready.done():
            self._log.mark_started()
            self._ready.set_result(rest)
        elif word == "LOADED" and not self._loaded.done():
            self._loaded.set_result(msgspec.json.decode(rest, type=Loaded))
        elif word == "RELOAD":
            self._on_reload(msgspec.json.decode(rest, type=ReloadCall))
        elif word == "BEAT":
            self.last_beat = msgspec.json.decode(rest, type=Beat)
            self.num_beats += 1

    def _start_failure(self) -> str:
        return f"the engine did not start: {self._log.error or self.exit_report()}"


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a realtime signal has none
        return f"signal {number}"
