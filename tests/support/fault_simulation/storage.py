"""Storage that outlives an engine process: the KV memory that its supervisor keeps, and a disk; and its use."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from fault_simulation.disk import Disk, ProcessDisk
from fault_simulation.world import Process, Thread, World, current_thread
from quire.engine_core.kv_tiers.disk_files import DiskFiles
from quire.engine_core.kv_tiers.file_tier import FileTier, SealedPage
from quire.engine_core.kv_tiers.page_file import Copy
from quire.kernels._native import CpuDevice, KvPages, ThreadPool
from quire.kernels.kv_file import KvFile
from quire.protocol.engine_shape import EngineShape

_HEADER_BYTES = 4096  # and records and tokens: see kernels/native/kv_cache/kv_file.h
_RECORD_BYTES = 64
_TILES = 2 << 20  # where the pages begin
OTHER_MODEL = "1" * 32
_SLOT_BYTES = 4096 + 96
SLACK_BYTES = 4096  # of a header, which the bound of the disk leaves out


@dataclass
class Storage:
    """Storage that outlives an engine process. `model` names all that KV depends on besides tokens, and may change."""

    world: World
    limits: EngineShape
    disk: Disk | None
    disk_bytes: int  # most bytes that the disk may take up
    keeps_memory: bool
    model: str = "0" * 32
    is_harmed: bool = False  # faults may harm it; otherwise it must not fail
    num_pages: Counter[str] = field(default_factory=Counter)  # KV pages by outcome

    def check(self) -> None:
        """Check the bound of the disk."""
        if self.disk is not None and (used := self.disk.num_bytes()) > self.disk_bytes + SLACK_BYTES:
            self.world.fail(f"{used} bytes are on the disk, which may have {self.disk_bytes}")

    def count_memory(self, memory: ProcessMemory) -> None:
        """Count what a process that has ended had taken over; no page may have been damaged unless by a fault."""
        num_dropped = memory.pages.num_dropped_pages
        self.num_pages["taken over from memory"] += memory.pages.num_taken_over_pages
        self.num_pages["damaged in memory"] += num_dropped
        if num_dropped and not self.is_harmed:
            self.world.fail(f"{num_dropped} pages of KV memory were damaged without a reason")

    def count_disk(self, stats: dict[str, float]) -> None:
        """Count what the tier of a process that has ended did; it may not have failed unless by a fault."""
        for name in ("read", "written", "evicted", "skipped"):
            self.num_pages[f"{name}, of the disk"] += int(stats[f"kv_disk_pages_{name}"])
        if stats["kv_disk_failures"] and not self.is_harmed:
            self.world.fail(f"the disk tier has failed without a reason: {stats}")

    def damage(self, kept: int) -> bool:
        """Flip some bits of kept memory; return False if there is none."""
        choose = self.world.random
        if os.fstat(kept).st_size < _TILES:
            return False
        ranges = list(self.ranges())
        for _ in range(choose.choice((1, 3, 20))):
            first, length = choose.choice((ranges[0], ranges[1], ranges[1]))
            offset = first + choose.randrange(length)
            byte = os.pread(kept, 1, offset)[0] ^ 1 << choose.randrange(8)
            os.pwrite(kept, bytes([byte]), offset)
        return True

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of KV memory that are in use: the records and tokens of pages, and the pages."""
        num_pages, size = self.limits.num_pages, self.limits.block_size
        return [(0, _HEADER_BYTES + num_pages * (_RECORD_BYTES + 4 * size)), (_TILES, num_pages * 4 * size)]


def disk_bytes(num_slots: int) -> int:
    """Return the bytes that so many pages take on disk."""
    return num_slots * _SLOT_BYTES


class ProcessMemory:
    """The KV memory of a process, of which the supervisor keeps `kept`: KvPages of a disk tier, and its Sealed.

    The process maps a copy, which is copied back at its death. So nothing that is left of it reaches the next one.
    """

    def __init__(self, process: Process, storage: Storage, kept: int) -> None:
        self._process = process
        self._kept = kept
        self._waiting: Thread | None = None
        limits = storage.limits
        self.fd = os.memfd_create("simulated")
        self._ranges = storage.ranges()
        if storage.keeps_memory:
            _copy(kept, self.fd, self._ranges)
        process.on_death.append(self._die)
        file = KvFile(self.fd, storage.model)
        file.prepare(limits.num_pages)
        self.page_bytes = 4 * limits.block_size
        self.pages = KvPages(
            _device(), self.fd, storage.model, limits.num_pages, limits.block_size, self.page_bytes, limits.vocab_size
        )
        (self._sealed,) = self.pages.sealed_queues
        self.bytes = memoryview(self.pages.tiles.data)
        self.positions = cast("MutableSequence[int]", self.bytes.cast("B").cast("I"))

    def seal(self) -> None:
        """Seal the pages that have been computed."""
        self._process.burn()
        self.pages.seal()
        if self._waiting is not None:
            self._waiting.wake()

    @property
    def num_left_out(self) -> int:
        return self._sealed.num_left_out

    def take(self, most: int, seconds: float) -> list[SealedPage]:
        if not (pages := self._sealed.take(most, 0.0)) and seconds:
            self._waiting = current_thread()
            self._waiting.wait(seconds)
            self._waiting = None
            pages = self._sealed.take(most, 0.0)
        return pages

    def is_sealed(self, page: int, seal: int) -> bool:
        return self._sealed.is_sealed(page, seal)

    def copy_page(self, page: int, copy: Copy) -> int:
        self._process.burn()
        return self.pages.copy_page(page, copy)

    def fill_page(self, page: int, copy: Copy) -> int:
        half, first = self.page_bytes // 2, page * self.page_bytes
        self.bytes[first : first + half] = copy.data[:half]
        self._process.burn()
        return self.pages.fill_page(page, copy)

    def close(self) -> None:
        """Give back the file. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _die(self) -> None:
        if self.fd >= 0:
            _copy(self.fd, self._kept, self._ranges)
            self.close()


def start_disk_tier(
    process: Process, storage: Storage, memory: ProcessMemory, disk: ProcessDisk | None
) -> FileTier | None:
    """Start the disk tier of an engine, if there is a disk."""
    if disk is None:
        return None
    folder, size, model = disk.folder, storage.disk_bytes, storage.model
    tier = FileTier(
        "disk", lambda: DiskFiles(folder, size, model, memory.page_bytes, disk), memory, memory, process.host
    )
    tier.start()
    return tier


def first_checksum(model: str, salt: str | None) -> int:
    """Return a checksum of all that KV depends on besides tokens."""
    return zlib.crc32(f"{model} {salt}".encode())


@cache
def _device() -> CpuDevice:
    return CpuDevice(ThreadPool(1))


def _copy(source: int, target: int, ranges: list[tuple[int, int]]) -> None:
    for offset, length in ranges:
        os.pwrite(target, os.pread(source, length, offset), offset)
