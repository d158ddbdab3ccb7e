"""An engine without a model over a tier on disk or in host memory, for tests that damage the files of the tier."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine_without_model import BLOCK_SIZE, PAGE_BYTES, Engine, memfd, tokens_of

from quire.engine_core.kv_tiers.disk_files import DiskFiles
from quire.engine_core.kv_tiers.file_tier import NUM_READERS, FileTier
from quire.engine_core.kv_tiers.host_file import HostFile
from quire.engine_core.kv_tiers.tier import Fetch

MODEL = "0" * 32
SLOT_BYTES = 4096 + 96
ROOM = 12 * SLOT_BYTES


class Process:
    """An engine without a model over a tier without threads: on disk in a folder, or in the host memory of a memfd."""

    def __init__(self, storage: Path | int, num_pages: int = 12, room: int = ROOM, model: str = MODEL) -> None:
        self.storage = storage
        self.engine = Engine(memfd(), num_pages, sealed_queues=1)
        self.native, self.sequences = self.engine.native, self.engine.sequences
        assert self.native.page_bytes == PAGE_BYTES
        self.files: list[DiskFiles | HostFile] = []

        def open_file() -> DiskFiles | HostFile:
            kept = room, model, PAGE_BYTES
            self.files.append(HostFile(storage, *kept) if isinstance(storage, int) else DiskFiles(storage, *kept))
            return self.files[-1]

        (self.sealed,) = self.native.sealed_queues
        self.name = "host" if isinstance(storage, int) else "disk"
        self.tier = FileTier(self.name, open_file, self.native, self.sealed)
        self.tier.open()

    def write(self) -> None:
        """Write what has been sealed."""
        self.tier.write(self.sealed.take(1000, 0.0))

    def find(self, salt: str, blocks: tuple[int, ...]) -> int:
        """Return the pages of a prefix that the tier has."""
        slot = self.sequences.open([*tokens_of(blocks), 0], 1, cache_salt=salt)
        keys = self.sequences.keys(slot)[1:]
        self.sequences.close(slot)
        return self.tier.find(keys)

    def fetch(self, salt: str, blocks: tuple[int, ...]) -> int:
        """Fetch what memory lacks of a prefix; return how many pages have come."""
        slot = self.sequences.open([*tokens_of(blocks), 0], 1, cache_salt=salt)
        here = self.sequences.match(slot)[0] // BLOCK_SIZE
        keys = self.sequences.keys(slot)[1 + here :]
        keys = keys[: self.tier.find(keys)]
        end = (here + len(keys)) * BLOCK_SIZE
        if not keys or self.sequences.start(slot, end) is None:
            self.sequences.close(slot)
            return 0
        done: list[Fetch] = []
        fetch = Fetch(keys, self.sequences.pages(slot)[here:], done.append)
        self.tier.fetch(fetch)
        reading = self.tier._readings[fetch]
        for reader in range(NUM_READERS):
            self.tier.read(reading, reader)
        assert done == [fetch]
        self.sequences.share(slot, (here + len(fetch.contents)) * BLOCK_SIZE, fetch.contents)
        self.sequences.close(slot)
        self.tier.probe()
        self.tier.keep_up()
        return len(fetch.contents)

    def close_all(self) -> None:
        while self.engine.slots:
            self.sequences.close(self.engine.slots.pop())

    def kill(self) -> None:
        for file in self.files:
            file.close()
        with contextlib.suppress(OSError):  # killed before
            self.engine.end()

    def stat(self, name: str) -> float:
        """Return a figure of the tier, by its name without that of the tier."""
        return self.tier.stats()[f"kv_{self.name}_{name}"]

    @property
    def failures(self) -> float:
        return self.stat("failures")
