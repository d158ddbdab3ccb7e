"""Faults of what outlives an engine: of the disk, and of the KV memory that the supervisor keeps."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from fault_simulation.storage import OTHER_MODEL

if TYPE_CHECKING:
    from fault_simulation.disk import Disk
    from fault_simulation.simulation import System

_WRITE_ERRORS = (errno.ENOSPC, errno.ENOSPC, errno.EIO, errno.EDQUOT)
_OPEN_ERRORS = (errno.EROFS, errno.EACCES, errno.EIO)
_DURATIONS = (0.3, 2.0, 12.0)  # seconds

Kinds = dict[str, tuple[int, Callable[[], bool]]]
"""Faults by name, with their weight; each returns whether it has happened."""


class StorageFaults:
    """All that may happen to the storage of a run."""

    def __init__(self, system: System, injected: Counter[str]) -> None:
        self._system = system
        self._world = system.world
        self._random = system.world.random
        self._storage = system.storage
        self._injected = injected
        if self._storage.disk is not None:
            self._storage.disk.injected = injected

    @property
    def kinds(self) -> Kinds:
        """The faults of KV memory, and of the disk if there is one."""
        kinds: Kinds = {
            "KV memory damaged": (4, self._damage_memory),
            "KV memory lost": (2, self._lose_memory),
            "code of the engine replaced": (1, self._replace_code),
        }
        if self._storage.disk is not None:
            kinds |= {
                "disk fails to write": (3, self._fail_writes),
                "disk fails to read": (3, self._fail_reads),
                "disk reads wrong bits": (4, self._flip_reads),
                "disk reads late": (6, self._read_late),
                "disk is slow": (3, self._slow_down),
                "disk hangs": (2, self._hang),
                "folder cannot be opened": (2, self._refuse_to_open),
                "folder in use": (2, self._use_folder),
                "files truncated": (3, self._truncate),
                "files damaged": (4, self._rot),
                "files deleted": (1, self._delete),
                "engine killed in a write": (4, self._tear),
                "power of the disk fails": (4, self._cut_power),
            }
        return kinds

    def end(self) -> None:
        """Let the disk be as good as new."""
        if self._storage.disk is not None:
            self._storage.disk.heal()

    @property
    def _disk(self) -> Disk:
        assert self._storage.disk is not None
        return self._storage.disk

    def _kill(self) -> bool:
        engine = self._system.engine
        if engine is None or not engine.process.is_alive:
            return False
        engine.process.kill("with its storage")
        self._injected["engine killed"] += 1
        return True

    def _kept_memory(self) -> int | None:
        """Return the KV memory that is kept, unless the supervisor has ended."""
        supervisor = self._system.clients[0].supervisor
        return None if supervisor is None or supervisor._kv_memory < 0 else supervisor._kv_memory

    def _damage_memory(self) -> bool:
        kept = self._kept_memory()
        return self._kill() and kept is not None and self._storage.damage(kept)

    def _lose_memory(self) -> bool:
        kept = self._kept_memory()
        if not self._kill() or kept is None:
            return False
        os.ftruncate(kept, 0)
        return True

    def _replace_code(self) -> bool:
        self._storage.model = OTHER_MODEL
        return self._kill()

    def _for_a_while(self, end: Callable[[], None]) -> bool:
        self._world.at(self._world.now + self._random.choice(_DURATIONS), end)
        return False  # counted when it happens

    def _fail_writes(self) -> bool:
        self._disk.write_error = self._random.choice(_WRITE_ERRORS)
        return self._for_a_while(lambda: setattr(self._disk, "write_error", 0))

    def _fail_reads(self) -> bool:
        self._disk.read_error = errno.EIO
        return self._for_a_while(lambda: setattr(self._disk, "read_error", 0))

    def _flip_reads(self) -> bool:
        self._disk.num_flips += self._random.choice((1, 3, 20))
        return False  # counted when it happens

    def _read_late(self) -> bool:
        self._disk.num_late += self._random.choice((1, 1, 2, 5))
        return False  # counted when it happens

    def _slow_down(self) -> bool:
        self._disk.slowness = self._random.choice((10.0, 100.0, 3000.0))
        self._for_a_while(lambda: setattr(self._disk, "slowness", 1.0))
        return True

    def _hang(self) -> bool:
        self._disk.is_hanging = True
        return self._for_a_while(lambda: setattr(self._disk, "is_hanging", False))

    def _refuse_to_open(self) -> bool:
        self._disk.open_error = self._random.choice(_OPEN_ERRORS)
        self._kill()
        return self._for_a_while(lambda: setattr(self._disk, "open_error", 0))

    def _use_folder(self) -> bool:
        """Let another engine of the same model use the folder."""
        self._kill()
        path = self._disk.folder / f"{self._storage.model}.index"
        if not path.exists():
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._system.held.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the next engine was faster
            return False
        self._for_a_while(lambda: fcntl.flock(descriptor, fcntl.LOCK_UN))
        return True

    def _truncate(self) -> bool:
        files = self._disk.files()
        for path in files:
            if self._random.random() < 0.7:
                os.truncate(path, self._random.randrange(path.stat().st_size + 1))
        self._kill_maybe()
        return bool(files)

    def _rot(self) -> bool:
        has_rotten = [self._disk.rot(path) for path in self._disk.files()]
        self._kill_maybe()
        return any(has_rotten)

    def _delete(self) -> bool:
        files = self._disk.files()
        for path in files:
            path.unlink()
        self._kill_maybe()
        return bool(files)

    def _tear(self) -> bool:
        self._disk.num_torn += 1
        return False  # counted when it happens

    def _cut_power(self) -> bool:
        self._kill()
        return self._disk.cut_power()

    def _kill_maybe(self) -> None:
        if self._random.random() < 0.6:
            self._kill()
