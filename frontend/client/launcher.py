"""The process of an engine: started, watched, and ended without leaving anything behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from quire.frontend.activity import Activity
from quire.frontend.children import start_child
from quire.frontend.client.engine_log import EngineLog
from quire.frontend.errors import EngineDeadError, EngineStartError
from quire.protocol.messages import SchedulerStats
from quire.protocol.supervision import GAVE_WAY

T = TypeVar("T")


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
_BEGIN_SECONDS = 5.0  # for a process that stands by to read a line
_SAMPLE_SECONDS = 1.0  # between samples of a process that starts
_MOST_IDLE_SAMPLES = 60  # between which it has done nothing


class Beat(msgspec.Struct):
    """A sign of life of an engine process, on its stdout every second: `BEAT` and this as JSON.

    `step_age`: seconds since a step ended, or since there is something to do; 0 while there is nothing.
    """

    step_age: float
    state: SchedulerStats


class Loaded(msgspec.Struct):
    """Facts about the model that an engine has loaded: what frontends know about it and keep."""

    text_files: dict[str, str]  # hash of each file, by name
    vocab_size: int
    eos_token_ids: list[int]


class Stage(msgspec.Struct):
    """The part of its start that an engine has begun. It `waits` for another engine, which its own owner watches."""

    what: str
    waits: bool = False


class Blame(msgspec.Struct):
    """The number of deaths before this engine that are the doing of one request."""

    num_deaths: int


class ReloadCall(msgspec.Struct):
    """A client's call of `reload`, see `protocol.messages.Reload`; `number` identifies it in the answer."""

    number: int
    settings: dict[str, bool | int | float | str | list[str] | None]
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
        self.num_blamed = 0  # of the deaths before it, those that a request has caused
        self._has_begun = threading.Event()
        self._stage = Stage("starting Python")
        # -P: folders in the current directory must not shadow packages.
        command = [sys.executable, "-P", "-m", "quire.engine_core", *flags, "--die-with-parent", str(self._owner)]
        command += [] if standby is None else ["--standby", standby]
        try:
            with self._log.open() as stderr:
                self._process = start_child(
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

    def begin(self) -> bool:
        """Have a process that stands by go on; return True once it says that it does, False if it does not soon."""
        self._write(b"\n")
        self._go_on()
        return self._has_begun.wait(_BEGIN_SECONDS) and not self.ended.is_set()

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
        """Wait for an event of the start, as long as the process does anything, and for `timeout` seconds at most.

        Samples are counted, not timed: if all were suspended, the process is not to blame.
        """
        activity, left = Activity(self.pid), timeout
        while True:
            try:
                return event.result(min(left, _SAMPLE_SECONDS))
            except FutureTimeoutError:
                left -= _SAMPLE_SECONDS
            activity.sample()
            if self._stage.waits:
                activity.num_idle_samples = 0
            self._go_on()
            if left <= 0:
                text = f"the engine was not ready within {timeout:g} s, while {self._stage.what}; raise start_timeout"
            elif activity.num_idle_samples >= _MOST_IDLE_SAMPLES:
                text = (
                    f"the engine did nothing for {activity.num_idle_samples} s, while {self._stage.what}; see whether "
                    "the files of the model can be read"
                )
            else:
                continue
            raise EngineStartError(f"{text}\n{self._log.stderr_tail}")

    def _go_on(self) -> None:
        """Continue the process, which somebody may have stopped."""
        self._process.send_signal(signal.SIGCONT)

    def exit_report(self, name: str = "the engine") -> EngineDeadError:
        """Return how the process called `name` has ended, with the error that kept it from starting, if there is one.

        The details have its stderr tail.
        """
        error = f": {self._log.error}" if self._log.error else ""
        tail = f"; the end of its stderr:\n{self._log.stderr_tail}" if self._log.stderr_tail else ""
        return EngineDeadError(f"{name} {self._end()}{error}", f"it was process {self.pid}{tail}")

    def _end(self) -> str:
        try:
            status = self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not end although it was killed: it waits for the kernel"
        if status == GAVE_WAY:
            return "was asked to end by a signal that was not its supervisor's, and gave way to the next one"
        if status >= 0:
            return f"exited with status {status}"
        by = " (manually, or because memory ran out)" if status == -signal.SIGKILL else ""
        return f"was killed by {_name_of(-status)}{by}"

    def stop(self, seconds: float) -> None:
        """End the engine for good, and kill it after `seconds`. Return when it is gone. Idempotent."""
        if os.getpid() != self._owner:
            return  # a forked child inherits the object, but does not own the engine
        try:
            self.tell("STOP")
            if not self._ready.done():  # it does not read lines yet
                self._process.terminate()
            self._go_on()  # it may be stopped
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()
        self._watcher.join(1.0)

    def interrupt(self) -> None:
        """Have the engine abort its requests, and end for good."""
        self.tell("ABORT")
        if not self._ready.done():
            self._process.send_signal(signal.SIGINT)

    def abort(self) -> None:
        """End a process that hangs or is stopped; it gets some time to write the stacks of its threads."""
        self._process.send_signal(signal.SIGABRT)
        self._go_on()  # a stopped process takes no other signal
        self.ended.wait(_DUMP_SECONDS)
        self._kill()
        self.ended.wait(KILL_SECONDS)

    def _kill(self) -> None:
        """Kill the process. What not even that ends, as the kernel waits for a disk, is left behind."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)

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
        self._has_begun.set()
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
        elif word == "BEGUN":
            self._has_begun.set()
        elif word == "STAGE":
            self._stage = msgspec.json.decode(rest, type=Stage)
        elif word == "BLAMED":
            self.num_blamed = msgspec.json.decode(rest, type=Blame).num_deaths
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
