"""The files of LoRA adapters, by which changes are seen; the engine's loop never waits long for a file system."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quire.engine_core.request import Request

MAX_LOOK_SECONDS = 1.0
"""Time after which files that can't be looked at are taken to be what they were."""

_WAIT_SECONDS = 0.005  # that the loop gives a look which has just begun; a local file system takes less than 0.1 ms
_MAX_THREADS = 16
_NAMES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

Files = frozenset[tuple[str, int, int, int, int]]
"""An adapter's files: names, inodes, sizes, and the times of contents and of inodes in nanoseconds. Empty: unknown."""


def files_of(path: str) -> Files:
    """Return the files of an adapter as they are now; nothing for a path that can't be looked at."""
    try:
        own = Path(path).stat()
        if not stat.S_ISDIR(own.st_mode):
            return frozenset({("", own.st_ino, own.st_size, own.st_mtime_ns, own.st_ctime_ns)})
        found = {("", own.st_ino, 0, 0, 0)}  # other files come and go in a folder
        for name in _NAMES:
            try:
                status = Path(path, name).stat()
            except FileNotFoundError:
                continue
            found.add((name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(found)


@dataclass(eq=False)
class _FileLook:
    """A look at the files of some paths, for the requests that have asked for it; a thread adds `answers`."""

    requests: dict[str, list[Request]]
    begun: float
    paths: tuple[str, ...]
    answers: dict[str, Files] = field(default_factory=dict)
    has_ended: threading.Event = field(default_factory=threading.Event)
    wakes: bool = False  # nobody waits for its end any longer

    @property
    def hung_paths(self) -> set[str]:
        """The paths without an answer."""
        return {path for path in self.paths if path not in self.answers}


class FileLooks:
    """Looks at files for requests, on a thread. Its owner calls `take` before each step while some are asked for."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """`wake` is called, on any thread, when there is an answer to take."""
        self._wake = wake
        self._clock = clock
        self._asked: dict[str, list[Request]] = {}
        self._looks: list[_FileLook] = []
        self._hung: list[_FileLook] = []  # answered as unknown, while their threads go on

    def ask(self, path: str, request: Request) -> None:
        """Have the files of a path looked at for a request, by the next `take`."""
        self._asked.setdefault(path, []).append(request)

    def join(self, request: Request, other: Request) -> bool:
        """Give a request the same answer as another one; return False if that waits for none."""
        for requests in (self._asked, *(look.requests for look in self._looks)):
            for each in requests.values():
                if other in each:
                    each.append(request)
                    return True
        return False

    def take(self) -> Iterator[tuple[str, list[Request], Files]]:
        """Yield the paths that have been looked at, each with its requests and files, which are empty if unknown."""
        self._hung = [look for look in self._hung if not look.has_ended.is_set()]
        yield from self._begin()
        for look in list(self._looks):
            is_late = self._clock() - look.begun > MAX_LOOK_SECONDS
            for path in list(look.requests):
                if path in look.answers or is_late:
                    yield path, look.requests.pop(path), look.answers.get(path, frozenset())
            if not look.requests:
                self._looks.remove(look)
                if not look.has_ended.is_set():
                    self._hung.append(look)

    def stop(self) -> bool:
        """Return False if a thread is looking, which can't be ended."""
        return all(look.has_ended.is_set() for look in (*self._looks, *self._hung))

    def _begin(self) -> Iterator[tuple[str, list[Request], Files]]:
        """Begin to look at what has been asked for; yield what can't be looked at, since earlier looks hang."""
        asked, self._asked = self._asked, {}
        hung = {path for look in self._hung for path in look.hung_paths}
        for path in list(asked):
            if path in hung or len(self._hung) + len(self._looks) >= _MAX_THREADS:
                yield path, asked.pop(path), frozenset()
        if not asked:
            return
        look = _FileLook(asked, self._clock(), tuple(asked))
        try:
            threading.Thread(target=self._run, args=(look,), name="quire-adapter-files", daemon=True).start()
        except RuntimeError:  # there are too many threads
            yield from ((path, requests, frozenset()) for path, requests in asked.items())
            return
        self._looks.append(look)
        look.wakes = not look.has_ended.wait(_WAIT_SECONDS)

    def _run(self, look: _FileLook) -> None:
        """Look at files; on a thread."""
        for path in look.paths:
            look.answers[path] = files_of(path)
        look.has_ended.set()
        if look.wakes:
            self._wake()
