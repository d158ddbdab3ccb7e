"""An engine without a model over a disk tier, for tests that damage the files of the tier."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine_without_model import BLOCK_SIZE, PAGE_BYTES, Engine, memfd, tokens_of

from quire.engine_core.kv_tiers.disk import NUM_READERS, DiskTier
from quire.engine_core.kv_tiers.disk_files import DiskFiles
from quire.engine_core.kv_tiers.tier import Fetch

MODEL = "0" * 32
SLOT_BYTES = 4096 + 96
ROOM = 12 * SLOT_BYTES


class Process:
    """An engine without a model over a disk tier without threads."""

    def __init__(self, folder: Path, num_pages: int = 12, room: int = ROOM, model: str = MODEL) -> None:
        self.folder = folder
        self.engine = Engine(memfd(), num_pages, log_sealed_pages=True)
        self.native, self.sequences = self.engine.native, self.engine.sequences
        assert self.native.page_bytes == PAGE_BYTES
        self.files: list[DiskFiles] = []

        def open_files() -> DiskFiles:
            self.files.append(DiskFiles(folder, room, model, PAGE_BYTES))
            return self.files[-1]

        self.tier = DiskTier(open_files, self.native)
        self.tier.open()

    def write(self) -> None:
        """Write what has been sealed."""
        self.tier.write(self.native.take_sealed(1000, 0.0))

    def find(self, salt: str, blocks: tuple[int, ...]) -> int:
        """Return the pages of a prefix that are on disk."""
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

    @property
    def failures(self) -> float:
        return self.tier.stats()["kv_disk_failures"]
