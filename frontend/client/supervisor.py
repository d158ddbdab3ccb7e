"""The supervisor of an engine: it starts the process, and starts it again when it dies or hangs.

An engine that was told to end, and did so with status 0, stays ended. One that dies again and again within a short time
is started after ever longer pauses, and at last no more. A client may ask for another one in its place, see `reload`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.frontend.client.engine_log import show
from quire.frontend.client.launcher import KILL_SECONDS, EngineProcess, ReloadCall, closed_in_forks
from quire.frontend.client.memory_file import memory_file
from quire.frontend.client.reload import Settings, Successor, change, refuse
from quire.frontend.client.restarts import Restarts
from quire.frontend.client.standby import Standby, begins
from quire.frontend.client.weight_files import WeightFile, WeightFiles
from quire.frontend.errors import EngineDeadError, EngineStartError
from quire.protocol.address import remove_address
from quire.protocol.engine_options import SupervisionOptions
from quire.protocol.host import HOST, Host
from quire.protocol.options import command_line
from quire.protocol.supervision import CRASHES, note_death

_MOST_BLOCKED_SECONDS = 0.5  # in which a signal may go unnoticed
_TICK_SECONDS = 1.0  # between beats, and between checks of them; less if
_TICKS_OF_TIMEOUT = 5  # would take longer than `step_timeout`, but at least
_LEAST_TICK_SECONDS = 0.2
_LATE_BEATS = 2  # that tell of no step for too long
_SILENT_SECONDS = 10.0  # without a beat, after which a process counts as stopped, if `step_timeout` is not shorter,
_LEAST_SILENT_SECONDS = 2.0  # which a beat may miss by chance


@dataclass(frozen=True, slots=True)
class MachinePart:
    """The part of one of several engines on a machine: its `share`, "I/N", and where the weights of all are."""

    share: str
    weights: WeightFiles

    @classmethod
    def each(cls, count: int) -> list[MachinePart | None]:
        """Return the parts of so many engines; None for a single one."""
        weights = WeightFiles()
        return [None] if count == 1 else [cls(f"{index}/{count}", weights) for index in range(count)]


@dataclass(frozen=True, slots=True)
class ProcessTimeouts:
    """Seconds that an engine's process gets: `start` until it is ready, `shutdown` for its open requests at the end."""

    start: float
    shutdown: float


class Supervisor:
    """The owner of an engine at `address`, whose processes come and go.

    `on_ready` is called on another thread, with the address, whenever one can be used. `failure` tells why there will
    be no other one; None as long as there may be.
    """

    def __init__(
        self,
        address: str,
        settings: Settings,
        options: SupervisionOptions,
        *,
        timeouts: ProcessTimeouts,
        part: MachinePart | None = None,
        on_ready: Callable[[str], None] = lambda _address: None,
        host: Host = HOST,
        process: Callable[..., EngineProcess] = EngineProcess,
    ) -> None:
        """Start the first process with these settings, on a part of the machine or the whole one.

        Raises `EngineStartError`.
        """
        self.address = address
        self._part = part
        self._weights = None if part is None else part.weights.of(settings)
        self._next_weights: WeightFile | None = None  # of a successor
        self.failure: EngineDeadError | None = None
        self._settings = settings
        self._options = options
        self._timeouts = timeouts
        self._on_ready = on_ready
        self._host = host
        self._new_process = process
        # The KV pages of an engine that has died are the next one's, and what it notes of requests that may kill it.
        self._kv_memory = memory_file("quire-kv")
        self._crash_journal = memory_file("quire-crash-journal")
        self._stopping = host.event()
        self._owner = os.getpid()
        self._restarts = Restarts(options.max_restarts, host.monotonic)
        self._tick_seconds, self._most_silent_ticks = _ticks(options.step_timeout)
        self._standby = Standby(lambda: self._spawn(standby="program"))
        try:
            self._process = self._spawn()
        except BaseException:  # a signal too may arrive here
            self._release()
            raise
        closed_in_forks.add(self)
        self._successor: Successor | None = None
        self._thread = host.thread("quire-supervisor", self._run)

    @property
    def pid(self) -> int:
        """Process id of the engine's last process."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status of the last process, negative for a signal; None while it runs."""
        return self._process.status

    def wait_ready(self) -> str:
        """Wait until the first process can be used; return its address. From then on it is watched.

        Raises `EngineStartError`: what keeps the first process from starting would keep the next ones too.
        """
        self.address = self._process.wait_ready(self._timeouts.start)
        self._restarts.note_ready()
        self._on_ready(self.address)
        self._thread.start()
        return self.address

    def join(self) -> None:
        """Wait until there will be no other process."""
        while self._thread.is_alive():  # a signal that comes just before a wait is handled after it
            self._thread.join(_MOST_BLOCKED_SECONDS)

    def interrupt(self) -> None:
        """Have the engine abort what it does, and end."""
        self._stopping.set()
        self._process.interrupt()

    def stop(self) -> None:
        """End the engine. Return when its process and its socket are gone. Idempotent."""
        if os.getpid() != self._owner:
            return  # a forked child inherits the object, but does not own the engine
        self._stopping.set()
        self._process.stop(self._timeouts.shutdown + KILL_SECONDS)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
            self._process.stop(KILL_SECONDS)  # one that was started meanwhile
        if self._successor is not None:
            self._successor.cancel()
        self._standby.stop()
        self._release()

    def close_in_child(self) -> None:
        """Close the KV memory, whose pages a forked child would keep from being freed, and the journal."""
        self._close_memory()

    def _spawn(self, settings: Settings | None = None, *, standby: str | None = None) -> EngineProcess:
        flags = [*command_line(self._settings if settings is None else settings), "--engine-address", self.address]
        flags += ["--beat-seconds", str(self._tick_seconds), "--shutdown-timeout", str(self._timeouts.shutdown)]
        flags += ["--kv-memory-fd", str(self._kv_memory), "--crash-journal-fd", str(self._crash_journal)]
        kept_fds = [self._kv_memory, self._crash_journal]
        if self._part is not None:
            weights = self._part.weights.of(self._settings if settings is None else settings)
            flags += ["--machine-share", self._part.share, "--weights-fd", str(weights.fd)]
            kept_fds.append(weights.fd)
        return self._new_process(flags, kept_fds=kept_fds, standby=standby, on_reload=self._start_reload)

    def _start_reload(self, call: ReloadCall) -> None:
        """Start the reload that a client of the engine asks for; on the thread that reads the engine's lines."""
        if self._stopping.is_set() or (self._successor is not None and not self._successor.has_failed):
            refuse(self._process, call, "another reload is in progress, or the engine ends; try again when it is done")
            return
        try:
            settings = change(self._settings, call.settings)
            self._next_weights = None if self._part is None else self._part.weights.of(settings)
            self._successor = Successor(
                self._process, call, settings, lambda new: self._spawn(new, standby="model"), self._timeouts.start,
                self._host,
            )  # fmt: skip
        except (ValueError, EngineStartError) as error:
            refuse(self._process, call, str(error))

    def _take_successor(self) -> Successor | None:
        """Return the successor of a process that has ended, if it can begin; end one that is not so far."""
        successor, self._successor = self._successor, None
        if successor is None or successor.is_loaded:
            return successor
        successor.cancel()
        return None

    def _hand_over(self, successor: Successor) -> bool:
        """Put a successor in the place of the process that has ended; return True once it can be used."""
        self._restarts.note_begin()
        if not begins(successor.process, "the reload's engine") or not self._use(successor.process):
            return False
        self._settings, self._weights = successor.settings, self._next_weights
        self._standby.stop()  # it has the settings from before
        return True

    def _release(self) -> None:
        """Give back the socket's file and the memory that engines share."""
        remove_address(self.address)
        self._part = self._weights = self._next_weights = None
        self._close_memory()

    def _close_memory(self) -> None:
        fds = self._kv_memory, self._crash_journal
        self._kv_memory = self._crash_journal = -1
        for fd in fds:
            with contextlib.suppress(OSError):  # it is closed already
                os.close(fd)

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for an engine that does not come
            self.failure = EngineDeadError("the supervisor of the engine failed", f"{type(error).__name__}: {error}")

    def _supervise(self) -> None:
        restarts = self._restarts
        while not self._stopping.is_set():
            cause = self._watch(self._process)
            if self._stopping.is_set():
                return
            if self._process.status == 0:  # a successor ends with `stop`
                self.failure = EngineDeadError("the engine was told to end, and has done so")
                return
            is_crash = not cause and -(self._process.status or 0) in CRASHES
            is_explained = note_death(self._crash_journal, is_crash=is_crash)
            successor = self._take_successor()
            if successor is None:
                restarts.note_death(is_explained=is_explained)
            elif self._hand_over(successor):
                continue
            else:
                restarts.reset()
                cause = "the reload failed: "
            report = self._process.exit_report()
            report = EngineDeadError(cause + report.summary, report.details)
            show(f"quire: {report.summary}\n")  # its stderr has been shown
            while not self._restart(report):
                if self._stopping.is_set() or self.failure is not None:
                    return
                restarts.note_failure()

    def _restart(self, report: EngineDeadError) -> bool:
        """Start the next process; return True once it can be used."""
        restarts = self._restarts
        if restarts.are_over:
            count = restarts.num_deaths
            times = f", {count} times in a row, and is not started again" if count > 1 else ""
            self.failure = EngineDeadError(f"{report.summary}{times}", report.details)
            return False
        pause = restarts.pause
        show(f"quire: starting the engine again{f' in {pause:g} s' * (pause > 0)}\n")
        if self._stopping.wait(pause):
            return False
        if restarts.is_puzzling:  # maybe its KV pages are the cause
            os.ftruncate(self._kv_memory, 0)
        restarts.note_begin()
        try:
            process = self._standby.take() or self._spawn()
        except EngineStartError as error:
            show(f"quire: {error}\n")
            return False
        return self._use(process)

    def _use(self, process: EngineProcess) -> bool:
        """Make a process that has begun the engine's; return True once it can be used, False if it has ended."""
        self._process = process
        try:
            if self._stopping.is_set():  # `stop` has ended the one before
                process.stop(KILL_SECONDS)
                return False
            address = process.wait_ready(self._timeouts.start)
        except EngineStartError as error:
            show(f"quire: {error}\n")
            process.abort()  # it may be ready by now, and is to tell no client that it shuts down
            return False
        finally:
            self._restarts.forgive(process.num_blamed)
        self._restarts.note_ready()
        with contextlib.suppress(OSError):  # nobody reads it any more
            self._on_ready(address)
        return True

    def _watch(self, process: EngineProcess) -> str:
        """Wait until a process ends, and end one that hangs; return what is to be said of that."""
        silent_ticks, late_beats, num_beats = 0, 0, -1
        while not process.ended.wait(self._tick_seconds):
            if self._options.max_restarts:
                self._standby.tick(self._tick_seconds)
            silent_ticks = silent_ticks + 1 if process.num_beats == num_beats else 0
            beat = process.last_beat
            is_late = beat is not None and 0 < self._options.step_timeout < beat.step_age
            late_beats = late_beats + (process.num_beats != num_beats) if is_late else 0
            num_beats = process.num_beats
            # Ticks and beats are counted, not timed: if all were suspended, the engine is not to blame.
            if silent_ticks >= self._most_silent_ticks:
                words = f"gave no sign of life for {silent_ticks * self._tick_seconds:.3g} s"
            elif late_beats >= _LATE_BEATS and beat is not None:
                words = f"ended no step for {beat.step_age:.0f} s (step_timeout={self._options.step_timeout:g})"
            else:
                continue
            state = "" if beat is None else f"; its last state: {beat.state}"
            process.abort()
            return f"the engine {words} and was ended{state}; "
        return ""


def _ticks(step_timeout: float) -> tuple[float, int]:
    """Return the seconds of a tick, and the ticks without a beat after which a process counts as stopped."""
    timeout = step_timeout or math.inf
    seconds = min(_TICK_SECONDS, max(_LEAST_TICK_SECONDS, timeout / _TICKS_OF_TIMEOUT))
    most = min(_SILENT_SECONDS, max(_LEAST_SILENT_SECONDS, timeout))
    return seconds, math.ceil(round(most / seconds, 3))


def stop_all(supervisors: Sequence[Supervisor]) -> None:
    """End engines, all at once; return when they are gone."""
    threads = [threading.Thread(target=supervisor.stop) for supervisor in supervisors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
