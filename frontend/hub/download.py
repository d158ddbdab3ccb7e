"""The download of files from the hub: several at once, checked against their checksums, and ended by Ctrl-C."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from quire.frontend.errors import HubError

_THREADS = 8
_END_SECONDS = 1.0


class HubFile(NamedTuple):
    """A file of a model at the hub; `checksum` is its SHA-256, or Git's SHA-1 of it."""

    path: str
    size: int
    checksum: str | None


class Place(NamedTuple):
    """A commit of a model at the hub, and the cache folder to which its files are downloaded."""

    name: str
    commit: str
    cache: Path


class _CancelledError(Exception):
    """The download has been cancelled."""


def download(files: Sequence[HubFile], place: Place, advance: Callable[[int], None]) -> None:
    """Download files into the cache; `advance` is called with the number of bytes as they arrive.

    Raises `HubError` for a file with another checksum, and the errors of `huggingface_hub`. After an error or Ctrl-C
    files that are complete stay in the cache.
    """
    threads = _Threads(files, place, advance)
    try:
        threads.run()
    except BaseException:
        threads.cancel()
        raise


class _Threads:
    """Threads that download files. Daemons, since a program that is interrupted must not wait for a connection."""

    def __init__(self, files: Sequence[HubFile], place: Place, advance: Callable[[int], None]) -> None:
        self._files, self._place, self._advance = list(reversed(files)), place, advance
        self._num_files = len(files)
        self._cancelled = threading.Event()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        number = min(_THREADS, len(files))
        self._threads = [threading.Thread(target=self._work, name="quire-hub", daemon=True) for _ in range(number)]

    def run(self) -> None:
        """Download all files. Raises the first error."""
        for thread in self._threads:
            thread.start()
        for _ in range(self._num_files):
            if (error := self._ended.get()) is not None:
                raise error

    def cancel(self) -> None:
        """End the threads, and remove what is incomplete."""
        self._cancelled.set()
        if (xet := sys.modules.get("huggingface_hub.utils._xet")) is not None:  # Hugging Face's own way of transfer
            xet.abort_xet_session()
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._remove_incomplete()

    def _remove_incomplete(self) -> None:
        """Remove the files of threads that still wait for data: they end with the program, and could not do it."""
        cache = f"{self._place.cache.resolve()}/"
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                file = descriptor.readlink()
                if str(file).startswith(cache) and file.suffix == ".incomplete":
                    file.unlink()

    def _work(self) -> None:
        with suppress(IndexError):
            while not self._cancelled.is_set():
                file = self._files.pop()
                try:
                    self._download(file)
                except BaseException as error:  # noqa: BLE001 - raised by `run`
                    self._ended.put(error)
                    return
                self._ended.put(None)

    def _download(self, file: HubFile) -> None:
        from huggingface_hub import hf_hub_download

        name, commit, cache = self._place
        bar: Any = _bar_class(self._count)
        path = Path(hf_hub_download(name, file.path, revision=commit, cache_dir=cache, tqdm_class=bar))
        self._check(file, path)

    def _count(self, num_bytes: int) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
        self._advance(num_bytes)

    def _check(self, file: HubFile, path: Path) -> None:
        """Raise `HubError` for a file with another checksum, and remove it."""
        if file.checksum is None:  # a mirror that does not tell
            return
        blob = path.resolve()
        is_git = len(file.checksum) == hashlib.sha1(usedforsecurity=False).digest_size * 2
        found = hashlib.sha1(usedforsecurity=False) if is_git else hashlib.sha256()
        if is_git:
            found.update(b"blob %d\0" % blob.stat().st_size)
        with blob.open("rb") as data:
            while chunk := data.read(1 << 20):
                self._count(0)
                found.update(chunk)
        if found.hexdigest() != file.checksum:
            path.unlink()
            blob.unlink(missing_ok=True)
            raise HubError(
                f"{file.path} of {self._place.name} arrived with the checksum {found.hexdigest()}, and the hub states "
                f"{file.checksum}; it was removed, so try again"
            )


def _bar_class(count: Callable[[int], None]) -> type[object]:
    """Return a stand-in for tqdm's class that passes the bytes on, which is how `huggingface_hub` reports them."""

    class Bar:
        def __init__(self, total: float | None = None, **_options: object) -> None:
            self.total, self.n = total, 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

        def update_transfer(self, _n: float | None = 1) -> None:
            """Count nothing: bytes that are written to the file are counted."""
            count(0)

        def ignore(self, *_values: object, **_options: object) -> None:
            """Show nothing."""

        close = refresh = set_postfix_str = set_transfer_postfix_str = ignore

    return Bar
