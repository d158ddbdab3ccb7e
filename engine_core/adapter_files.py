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
    """A look at the files of paths, one after the other, for the requests that have asked for it."""

    requests: dict[str, list[Request]]  # of the paths whose answers have not been taken, in order
    begun: float
    answers: dict[str, Files] = field(default_factory=dict)
    has_ended: threading.Event = field(default_factory=threading.Event)
    wakes: bool = False  # nobody waits for its end any longer


class FileLooks:
    """Looks at files for requests, on threads. Its owner calls `take` before each step while some are asked for.

    No path is looked at twice at a time: what asks for it meanwhile waits for its next look. A path that hangs keeps
    its thread, and is unknown until that goes on; the paths after it get another look.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """`wake` is called, on any thread, when there is an answer to take."""
        self._wake = wake
        self._clock = clock
        self._asked: dict[str, list[Request]] = {}
        self._looks: list[_FileLook] = []
        self._hung: dict[str, _FileLook] = {}  # by path

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
        self._hung = {path: look for path, look in self._hung.items() if not look.has_ended.is_set()}
        yield from self._answered()
        looked_at = {path for look in self._looks for path in look.requests}
        next_look: dict[str, list[Request]] = {}
        for path in [path for path in self._asked if path not in looked_at]:
            requests = self._asked.pop(path)
            if path in self._hung or len(self._hung) + len(self._looks) >= _MAX_THREADS:
                yield path, requests, frozenset()
            else:
                next_look[path] = requests
        if next_look:
            self._begin(next_look)
            yield from self._answered()

    def stop(self) -> bool:
        """Return False if a thread is looking, which can't be ended."""
        return all(look.has_ended.is_set() for look in (*self._looks, *self._hung.values()))

    def _begin(self, requests: dict[str, list[Request]]) -> None:
        """Begin to look at paths."""
        look, paths = _FileLook(requests, self._clock()), tuple(requests)
        self._looks.append(look)
        try:
            threading.Thread(target=self._run, args=(look, paths), name="quire-adapter-files", daemon=True).start()
        except RuntimeError:  # there are too many threads
            look.answers = dict.fromkeys(paths, frozenset())
            look.has_ended.set()
        look.wakes = not look.has_ended.wait(_WAIT_SECONDS)

    def _answered(self) -> Iterator[tuple[str, list[Request], Files]]:
        """Yield what looks have found, and paths that hang as unknown, after which others are asked for again."""
        for look in list(self._looks):
            has_ended = look.has_ended.is_set()
            for path in [path for path in look.requests if path in look.answers]:
                yield path, look.requests.pop(path), look.answers[path]
            if has_ended:
                self._looks.remove(look)
            elif look.requests and self._clock() - look.begun > MAX_LOOK_SECONDS:
                self._looks.remove(look)
                path, *others = look.requests
                self._hung[path] = look
                for other in others:
                    self._asked[other] = look.requests[other] + self._asked.get(other, [])
                yield path, look.requests[path], frozenset()

    def _run(self, look: _FileLook, paths: tuple[str, ...]) -> None:
        """Look at files; on a thread."""
        for path in paths:
            look.answers[path] = files_of(path)
        look.has_ended.set()
        if look.wakes:
            self._wake()
