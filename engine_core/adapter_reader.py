"""The reader of LoRA adapters: one at a time, on a thread, for as long as it goes on.

A read that makes no progress for too long, as where a file system hangs, is an error, and its thread is left alone: the
next read has another one. Progress is the time that the thread computes, which reading takes too: how long all of it
takes depends on the disk, on the base model if there are norms of DoRA to compute, and on the steps that go first. An
error is remembered for some seconds, as long as the files stay what they are.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.engine_core.adapter_files import Files, files_of
from quire.kernels.adapters.packing import PackedAdapter
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.runner import DeviceLostError

MAX_HUNG_SECONDS = 60.0  # without progress
ERROR_SECONDS = 10.0  # for which an error is remembered

_MAX_ERRORS = 256
_MAX_ERROR = 4096  # characters, of which a hostile file may have many
_MAX_HUNG_THREADS = 16
_LEAST_PROGRESS = 0.001  # seconds of computing: retries of a hung file system take less
_NICE = 5  # a stream on all cores leaves it a quarter of one then


class AdapterLoader(Protocol):
    """Reads adapters, and lets the kernels have them."""

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        """Return an adapter, and a hash of its contents. Raises ModelError, and MemoryShortageError. Any thread."""

    def set_adapter(self, number: int, packed: PackedAdapter | None) -> None:
        """Let sequences with this number be computed by the adapter, in place of the one before; between steps. None
        gives back its memory."""


@dataclass(frozen=True)
class AdapterContents:
    """An adapter that has been read. `digest`: a hash of what its files contain; `files`: them before the read."""

    digest: str
    packed: PackedAdapter
    files: Files


@dataclass(frozen=True)
class ShortMemory:
    """There is too little memory for an adapter as long as others are in memory."""

    error: str


@dataclass(frozen=True)
class _KnownError:
    error: str
    files: Files
    time: float


@dataclass(eq=False)
class _Read:
    """A read, and its result once there is one: the adapter, or an error as text, since exceptions keep their frames;
    only a lost GPU, with which the engine ends, is an exception.

    `last_progress`: when it had computed for `computed` seconds. `has_hung`: nobody takes the result. `is_known`: it is
    an error that was remembered.
    """

    path: str
    last_progress: float
    computed: float = 0.0
    clock_id: int | None = None  # of the thread's computing
    has_hung: bool = False
    is_known: bool = False
    files: Files = frozenset()
    result: AdapterContents | ShortMemory | DeviceLostError | str | None = None

    def note_progress(self, now: float) -> None:
        """Note what the thread has computed, if it is enough."""
        if self.clock_id is None:
            return
        with contextlib.suppress(OSError):  # the thread has ended
            computed = time.clock_gettime(self.clock_id)
            if computed - self.computed >= _LEAST_PROGRESS:
                self.computed, self.last_progress = computed, now


class AdapterReader:
    """Reads one adapter at a time. Its owner calls `take`, at least once a second, until it returns the result."""

    def __init__(self, loader: AdapterLoader, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """`wake` is called, on any thread, when there is a result to take."""
        self._loader = loader
        self._wake = wake
        self._clock = clock
        self._current: _Read | None = None
        self._hung: list[_Read] = []
        self._errors: dict[str, _KnownError] = {}  # by path, the oldest first

    def start(self, path: str) -> None:
        """Begin to read an adapter; the result of the one before has been taken."""
        self._current = read = _Read(path, self._clock())
        self._hung = [each for each in self._hung if each.result is None]
        try:
            self._check_hung(path)
            threading.Thread(
                target=self._run, args=(read, self._known_error(path)), name="quire-adapters", daemon=True
            ).start()
        except (ModelError, RuntimeError) as error:  # RuntimeError: there are too many threads
            read.result = str(error)
            self._wake()

    def take(self) -> AdapterContents | ShortMemory | str | None:
        """Return the adapter that has been read, or the error, once; None while the read goes on.

        Raises DeviceLostError if the read has found that the GPU is lost.
        """
        if (read := self._current) is None:
            return None
        result = read.result
        if result is None:
            read.note_progress(now := self._clock())
            if now - read.last_progress < MAX_HUNG_SECONDS:
                return None
            read.has_hung = True
            self._hung.append(read)
            result = (
                f"reading it has made no progress for {MAX_HUNG_SECONDS:g} s; check its file system, or put it on "
                "another one"
            )
        elif isinstance(result, str) and read.files and not read.is_known:  # else it would never be read again
            self._remember(read.path, _KnownError(result, read.files, self._clock()))
        self._current = None
        if isinstance(result, DeviceLostError):
            raise result
        return result

    def stop(self) -> bool:
        """Return False if a thread is reading, which can't be ended."""
        reads = [*self._hung, *([] if self._current is None else [self._current])]
        return all(read.result is not None for read in reads)

    def _check_hung(self, path: str) -> None:
        """Raise ModelError if a read of the path, or of too many others, hangs."""
        if any(each.path == path for each in self._hung):
            raise ModelError(
                f"a read of it, without progress for {MAX_HUNG_SECONDS:g} s, has not ended; check its file system"
            )
        if len(self._hung) >= _MAX_HUNG_THREADS:
            raise ModelError(
                f"reads of {len(self._hung)} other adapters, without progress for {MAX_HUNG_SECONDS:g} s, have not "
                "ended; check their file systems"
            )

    def _known_error(self, path: str) -> _KnownError | None:
        known = self._errors.get(path)
        return known if known is not None and self._clock() - known.time < ERROR_SECONDS else None

    def _remember(self, path: str, known: _KnownError) -> None:
        self._errors.pop(path, None)
        self._errors[path] = known
        if len(self._errors) > _MAX_ERRORS:
            del self._errors[next(iter(self._errors))]

    def _run(self, read: _Read, known: _KnownError | None) -> None:
        """Read an adapter; on a thread."""
        _lower_priority()
        read.clock_id = time.pthread_getcpuclockid(threading.get_ident())
        read.files = files_of(read.path)
        if known is not None and known.files == read.files:
            read.is_known = True
            read.result = known.error
        else:
            result = self._read(read)
            read.result = "it came too late" if read.has_hung else result  # which would take memory
        self._wake()

    def _read(self, read: _Read) -> AdapterContents | ShortMemory | DeviceLostError | str:
        try:
            return AdapterContents(*self._loader.read_adapter(Path(read.path)), read.files)
        except MemoryShortageError as error:
            return ShortMemory(str(error)[:_MAX_ERROR])
        except DeviceLostError as error:
            return error
        except ModelError as error:
            return str(error)[:_MAX_ERROR]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the adapter's fault alone
            return f"{type(error).__name__}: {error}"[:_MAX_ERROR]


def _lower_priority() -> None:
    """Leave the cores to the threads that compute."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux
