"""The reader of LoRA adapters: one at a time, on a thread, and for a limited time.

A read that takes too long, as where a file system hangs, is an error, and its thread is left alone: the next read has
another one. An error is remembered for some seconds, as long as the files stay what they are.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from quire.kernels.adapters.packing import PackedAdapter
from quire.kernels.errors import MemoryShortageError, ModelError

MAX_READ_SECONDS = 60.0
ERROR_SECONDS = 10.0  # for which an error is remembered

_MAX_ERRORS = 256
_MAX_ERROR = 4096  # characters, of which a hostile file may have many
_MAX_HUNG_THREADS = 16
_MAX_FILES = 64  # of a folder, by which a change is seen; an adapter has two or three
_NICE = 5  # a stream on all cores leaves it a quarter of one then

_Files = frozenset[tuple[str, int, int]]
"""The names of an adapter's files, with their times in nanoseconds and their sizes."""


class AdapterLoader(Protocol):
    """Reads adapters, and lets the kernels have them."""

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        """Return an adapter, and a hash of its contents. Raises ModelError, and MemoryShortageError. Any thread."""

    def set_adapter(self, number: int, packed: PackedAdapter | None) -> None:
        """Let sequences with this number be computed by the adapter, in place of the one before; between steps. None
        gives back its memory."""


@dataclass(frozen=True)
class AdapterContents:
    """An adapter that has been read. `digest`: a hash of what its files contain."""

    digest: str
    packed: PackedAdapter


@dataclass(frozen=True)
class ShortMemory:
    """There is too little memory for an adapter as long as others are in memory."""

    error: str


@dataclass(frozen=True)
class _KnownError:
    error: str
    files: _Files
    time: float


@dataclass(eq=False)
class _Read:
    """A read, and its result once there is one: the adapter, or an error as text, since exceptions keep their frames.

    `has_hung`: nobody takes the result. `is_known`: it is an error that was remembered.
    """

    path: str
    begun: float
    has_hung: bool = False
    is_known: bool = False
    files: _Files = frozenset()
    result: AdapterContents | ShortMemory | str | None = None


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
        """Return the adapter that has been read, or the error, once; None while the read goes on."""
        if (read := self._current) is None:
            return None
        result = read.result
        if result is None:
            if self._clock() - read.begun < MAX_READ_SECONDS:
                return None
            read.has_hung = True
            self._hung.append(read)
            result = (
                f"reading and packing it has taken more than {MAX_READ_SECONDS:g} s; put it on a faster disk, or merge "
                "one with DoRA, whose norms take the time, into its model with peft's merge_and_unload()"
            )
        elif isinstance(result, str) and read.files and not read.is_known:  # else it would never be read again
            self._remember(read.path, _KnownError(result, read.files, self._clock()))
        self._current = None
        return result

    def stop(self) -> bool:
        """Return False if a thread is reading, which can't be ended."""
        reads = [*self._hung, *([] if self._current is None else [self._current])]
        return all(read.result is not None for read in reads)

    def _check_hung(self, path: str) -> None:
        """Raise ModelError if the path, or too many others, have been being read for too long."""
        if any(each.path == path for each in self._hung):
            raise ModelError(
                f"a read of it has not ended after more than {MAX_READ_SECONDS:g} s; check its file system"
            )
        if len(self._hung) >= _MAX_HUNG_THREADS:
            raise ModelError(
                f"reads of {len(self._hung)} other adapters have not ended after more than {MAX_READ_SECONDS:g} s; "
                "check their file systems"
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
        read.files = _files_of(read.path)
        if known is not None and known.files == read.files:
            read.is_known = True
            read.result = known.error
        else:
            result = self._read(read.path)
            read.result = "it came too late" if read.has_hung else result  # which would take memory
        self._wake()

    def _read(self, path: str) -> AdapterContents | ShortMemory | str:
        try:
            return AdapterContents(*self._loader.read_adapter(Path(path)))
        except MemoryShortageError as error:
            return ShortMemory(str(error)[:_MAX_ERROR])
        except ModelError as error:
            return str(error)[:_MAX_ERROR]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the adapter's fault alone
            return f"{type(error).__name__}: {error}"[:_MAX_ERROR]


def _lower_priority() -> None:
    """Leave the cores to the threads that compute."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux


def _files_of(path: str) -> _Files:
    """Return what tells that an adapter's files have changed; nothing for a path that can't be looked at."""
    try:
        own = Path(path).stat()
        found = {("", own.st_mtime_ns, own.st_size)}
        if stat.S_ISDIR(own.st_mode):
            with os.scandir(path) as entries:
                for entry in islice(entries, _MAX_FILES):
                    status = entry.stat()
                    found.add((entry.name, status.st_mtime_ns, status.st_size))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(found)
