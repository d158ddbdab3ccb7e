"""A disk: a folder of real files that outlives engines, and all that may go wrong with it."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fault_simulation.world import Process, World, sleep

_SECTOR = 512  # bytes, which a disk writes whole or not at all
_FOREVER = 1e9
_LATE_SECONDS = (2.0, 6.0, 35.0, 60.0, _FOREVER)


class Disk:
    """A folder, and what is wrong with it now. Errors are numbers of `errno`; 0: none."""

    def __init__(self, world: World, folder: Path, seconds: float) -> None:
        """`seconds` of an operation."""
        self.folder = folder
        self.random: random.Random = world.random
        self.seconds = seconds
        self.slowness = 1.0
        self.is_hanging = False
        self.open_error = self.read_error = self.write_error = 0
        self.num_flips = 0  # of bits, one in each of the next reads
        self.num_late = 0  # of the next reads, which take long
        self.num_torn = 0  # of the next writes, each of which ends its process
        self.injected: Counter[str] = Counter()  # faults by kind
        self._unsynced: dict[tuple[Path, int], list[bytes]] = {}  # a sector's contents before each write

    def heal(self) -> None:
        """Let nothing be wrong from now on."""
        self.slowness, self.is_hanging = 1.0, False
        self.open_error = self.read_error = self.write_error = self.num_flips = self.num_late = self.num_torn = 0

    def files(self) -> list[Path]:
        """Return its files."""
        return sorted(self.folder.iterdir()) if self.folder.exists() else []

    def num_bytes(self) -> int:
        """Return the sizes of its files."""
        return sum(path.stat().st_size for path in self.files())

    def rot(self, path: Path) -> bool:
        """Flip some bits of a file; return False if it is empty."""
        size = path.stat().st_size
        if size:
            with path.open("r+b", buffering=0) as file:
                for _ in range(self.random.choice((1, 1, 4, 30))):
                    file.seek(self.random.randrange(size))
                    byte = file.read(1)[0] ^ 1 << self.random.randrange(8)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte]))
        return size > 0

    def note_write(self, path: Path, descriptor: int, offset: int, length: int) -> None:
        """Note that a write is about to come, which is not synced."""
        for sector in range(offset // _SECTOR, (offset + length - 1) // _SECTOR + 1):
            before = os.pread(descriptor, _SECTOR, sector * _SECTOR)
            self._unsynced.setdefault((path, sector), []).append(before)

    def cut_power(self) -> bool:
        """Take back writes, of each sector the last ones or none; return False if there were none."""
        unsynced, self._unsynced = self._unsynced, {}
        for (path, sector), before in unsynced.items():
            first_lost = self.random.randrange(2 * len(before))
            if first_lost < len(before) and path.exists():
                with path.open("r+b", buffering=0) as file:
                    length = min(_SECTOR, path.stat().st_size - sector * _SECTOR)
                    file.seek(sector * _SECTOR)
                    file.write(before[first_lost].ljust(_SECTOR, b"\0")[: max(0, length)])
        return bool(unsynced)


class ProcessDisk:
    """The disk as a process uses it: what `DiskFiles` need of `os`."""

    def __init__(self, process: Process, disk: Disk) -> None:
        self._process = process
        self._disk = disk
        self.folder = disk.folder
        self._paths: dict[int, Path] = {}  # of open descriptors
        process.on_death.append(self.close_all)

    def open(self, path: Path, flags: int, mode: int, /) -> int:
        self._begin(self._disk.open_error, "open")
        descriptor = os.open(path, flags, mode)
        self._paths[descriptor] = path
        return descriptor

    def close(self, descriptor: int, /) -> None:
        del self._paths[descriptor]
        os.close(descriptor)

    def close_all(self) -> None:
        """Close what a dead process has left open."""
        while self._paths:
            with suppress(OSError):
                os.close(self._paths.popitem()[0])

    def pread(self, descriptor: int, length: int, offset: int, /) -> bytes:
        self._begin(self._disk.read_error, "read")
        data = bytearray(os.pread(descriptor, length, offset))
        self._flip(memoryview(data))
        return bytes(data)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int, /) -> int:
        disk = self._disk
        self._take_time()
        if disk.num_late:
            disk.num_late -= 1
            disk.injected["disk reads late"] += 1
            sleep(disk.random.choice(_LATE_SECONDS))
        self._begin(disk.read_error, "read")
        count = os.preadv(descriptor, buffers, offset)
        self._flip(buffers[0][:count])
        return count

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int, /) -> int:
        disk, path = self._disk, self._paths[descriptor]
        if path.suffix == ".pages":  # the small ones come with it
            self._take_time()
        self._begin(disk.write_error, "write")
        disk.note_write(path, descriptor, offset, len(data))
        if disk.num_torn or self._process.fuse is not None:
            half = disk.random.randrange(len(data))
            os.pwrite(descriptor, data[:half], offset)
            if disk.num_torn:
                disk.num_torn -= 1
                disk.injected["engine killed in a write"] += 1
                self._process.fuse = 1
            self._process.burn()
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, length: int, /) -> None:
        self._begin(self._disk.write_error, "truncate")
        os.truncate(descriptor, length)

    def _begin(self, error: int, what: str) -> None:
        if self._disk.is_hanging:
            self._disk.injected[f"disk hangs: {what}"] += 1
            sleep(_FOREVER)
        self._process.burn()
        if error:
            self._disk.injected[f"disk fails: {what} {errno.errorcode[error]}"] += 1
            raise OSError(error, os.strerror(error))

    def _take_time(self) -> None:
        sleep(self._disk.seconds * self._disk.slowness * (0.5 + self._disk.random.random()))

    def _flip(self, data: memoryview) -> None:
        if self._disk.num_flips and data:
            self._disk.num_flips -= 1
            self._disk.injected["disk reads a wrong bit"] += 1
            data[self._disk.random.randrange(len(data))] ^= 1 << self._disk.random.randrange(8)
