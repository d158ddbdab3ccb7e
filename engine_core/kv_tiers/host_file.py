"""The file of the host tier: host memory in a memfd, which one engine at a time may use.

It has the header and the records of an index (see page_file.py), and then the slots, from a place that does not depend
on their number. A supervisor keeps it for the next engine, which may hold its own KV pages there (kernels/kv_file.py):
by the header each discards what the other has left.
"""

from __future__ import annotations

import fcntl
import logging
import os

from quire.engine_core.kv_tiers.page_file import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_SLOTS,
    RECORD_BYTES,
    VERSION,
    Disk,
    FileInUseError,
    IndexHeader,
    SlotFile,
    UnusableFileError,
    slot_bytes,
)

DATA_START = -(-(HEADER_BYTES + MAX_SLOTS * RECORD_BYTES) // BLOCK_BYTES) * BLOCK_BYTES

logger = logging.getLogger(__name__)


class HostFile(SlotFile):
    """The file in host memory: a PageFile. It takes memory as it is written."""

    def __init__(self, descriptor: int, max_bytes: int, model: str, page_bytes: int, disk: Disk = os) -> None:
        """Use the memfd `descriptor`, of which pages and records may take `max_bytes`. Raises UnusableFileError."""
        super().__init__(disk, page_bytes, DATA_START)
        self._index = self._data = descriptor
        room = max_bytes // least_bytes(page_bytes)
        self.num_slots = min(room, MAX_SLOTS)
        if self.num_slots < 1:
            raise UnusableFileError(f"{max_bytes} bytes hold no page, which takes {least_bytes(page_bytes)}; give more")
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it does
            if self._begin(IndexHeader(VERSION, model, page_bytes, "host")):
                logger.info("host tier: the KV pages of another model or device are discarded")
            self._cut()
        except BlockingIOError:
            raise FileInUseError("the host memory of KV pages is used by another engine") from None
        except OSError as error:
            raise UnusableFileError(f"the host memory of KV pages: {error.strerror}") from None
        if room > self.num_slots:
            logger.info("host tier: %d of the %d pages that there is memory for is the most", MAX_SLOTS, room)

    def is_gone(self) -> bool:
        """See PageFile."""
        return False

    def close(self) -> None:
        """Let another engine use the file, whose descriptor stays open."""
        fcntl.lockf(self._data, fcntl.LOCK_UN)

    def _cut(self) -> None:
        """Cut off the slots of a larger file, and their records, which would come back with them."""
        if (num_there := -(-self._data_bytes() // self._slot_bytes)) > self.num_slots:
            self._write_records(self.num_slots, bytes((min(num_there, MAX_SLOTS) - self.num_slots) * RECORD_BYTES))
            self._disk.truncate(self._data, self._offset(self.num_slots))


def discard(descriptor: int) -> None:
    """Give back the memory of the file once no other engine uses it. Blocks until then."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, 0)
    fcntl.lockf(descriptor, fcntl.LOCK_UN)


def least_bytes(page_bytes: int) -> int:
    """Return the bytes that a page takes with its record."""
    return slot_bytes(page_bytes) + RECORD_BYTES
