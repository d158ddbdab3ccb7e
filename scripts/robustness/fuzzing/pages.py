"""Target `pages`: the files of the tiers on disk and in host memory, and the KV memory that outlives an engine.

An input is a byte, 0 for the disk tier's index, 1 for its pages, 2 for the KV memory and 3 for the host tier's file,
and then: the index's header line and its records, without the blank space between them; or places (4 bytes,
little-endian) in the others, each with the byte to write there.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

from engine_without_model import Engine, memfd
from fuzzing.target import mutate_json, replace
from tier_process import MODEL, Process

from quire.engine_core.kv_tiers.host_file import DATA_START
from quire.engine_core.kv_tiers.page_file import HEADER_BYTES, RECORD, RECORD_BYTES, checksum_of

_INDEX, _PAGES, _MEMORY, _HOST = range(4)
_OTHER_MODEL = "1" * 32
_SLOT_BYTES = 4096
_PREFIXES = ((1, 2, 3), (1, 2, 2), (3, 1), (2,))
_NUM_PAGES = 12
_PLACE_BYTES = 5
_NUMBERS = (0, 1, 2, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)


class Pages:
    """Whatever the files hold, an engine starts, every page that it takes over is right, and the tier goes on."""

    words = ("version", "model", "page_bytes", MODEL, "\n")

    def __init__(self, folder: Path) -> None:
        self._good, self._folder = folder / "good", folder / "damaged"
        self._host = memfd()
        for storage in (self._host, self._good):
            process = Process(storage, _NUM_PAGES)
            for blocks in _PREFIXES:
                process.engine.compute("", blocks)
            process.close_all()
            process.write()
            self._memory = process.engine.copy()
            process.kill()
        self._index = (self._good / f"{MODEL}.index").read_bytes()

    def seeds(self) -> Iterator[bytes]:
        """See Target."""
        line, _, _ = self._index.partition(b"\n")
        yield bytes([_INDEX]) + line + b"\n" + self._index[HEADER_BYTES:]
        yield bytes([_PAGES]) + _place(3, 1)
        for place in (100, 4096, 4096 + 17, 8192, 1 << 31):
            yield bytes([_MEMORY]) + _place(place, 1)
        for place in (2, HEADER_BYTES, HEADER_BYTES + 70, DATA_START, DATA_START + 2 * _SLOT_BYTES):
            yield bytes([_HOST]) + _place(place, 1)

    def test(self, data: bytes) -> None:
        """See Target."""
        if data[:1] == bytes([_MEMORY]):
            self._test_memory(data[1:])
        elif data[:1] == bytes([_HOST]):
            self._test_host(data[1:])
        else:
            self._test_disk(data)

    def _test_disk(self, data: bytes) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._good, self._folder)
        if data[:1] == bytes([_PAGES]):
            with (self._folder / f"{MODEL}.pages").open("r+b") as file:
                _write_places(file.fileno(), data[1:])
        else:
            line, newline, records = data[1:].partition(b"\n")
            header = (line + newline).ljust(HEADER_BYTES, b"\0") if newline else line
            for model in (MODEL, _OTHER_MODEL):
                replace(self._folder / f"{model}.index", header + records)
            (self._folder / f"{_OTHER_MODEL}.pages").write_bytes(bytes(_NUM_PAGES * _SLOT_BYTES))
        process = Process(self._folder, _NUM_PAGES)
        try:
            self._use(process)
        finally:
            process.kill()

    @staticmethod
    def _use(process: Process) -> None:
        """Fetch, compute and write, more than the tier has room for."""
        for blocks in _PREFIXES:
            process.fetch("", blocks)
        process.engine.check()
        process.tier.touch([page.key for page in process.files[-1].load()])
        for blocks in itertools.product((1, 2, 3), (1, 2)):
            process.engine.compute("tenant", blocks)
            process.close_all()
            process.write()
        process.engine.check()
        assert process.stat("pages") <= process.stat("pages_total")
        assert process.stat("pages_written") > 0

    def _test_host(self, places: bytes) -> None:
        copy = _damaged(self._host, places)
        process = Process(copy, _NUM_PAGES)
        try:
            self._use(process)
        finally:
            process.kill()
            os.close(copy)

    def _test_memory(self, places: bytes) -> None:
        copy = _damaged(self._memory, places)
        engine = Engine(copy, _NUM_PAGES)
        engine.check()
        for blocks in _PREFIXES:
            engine.compute("", blocks)
        engine.check()
        engine.end()

    def mutate(self, data: bytes, random: Random) -> bytes:
        """See Target."""
        kind = data[0] if data else 0
        if kind in {_PAGES, _MEMORY, _HOST}:
            at = _PLACE_BYTES * random.randrange(len(data) // _PLACE_BYTES + 1)
            place = random.choice((random.randrange(1 << 14), random.randrange(1 << 32)))
            return data[: 1 + at] + _place(place, random.randrange(256)) + data[1 + at :]
        line, _, rest = data[1:].partition(b"\n")
        if random.randrange(6) == 0:
            return data[:1] + mutate_json(line, random) + b"\n" + rest
        records = [rest[at : at + RECORD_BYTES] for at in range(0, len(rest), RECORD_BYTES)]
        if not records:
            raise ValueError("no record")
        slot = random.randrange(len(records))
        records[slot : slot + 1] = [self._mutate_record(random.choice(records), slot, random)]
        return data[:1] + line + b"\n" + b"".join(records)

    @staticmethod
    def _mutate_record(record: bytes, slot: int, random: Random) -> bytes:
        """Return a record that differs in a field, with the right checksum.

        No key is given to the KV of another one, which no checksum could tell.
        """
        prefix, key, content, last_use = RECORD.unpack_from(record.ljust(RECORD_BYTES, b"\0"))
        match random.randrange(4):
            case 0:
                prefix = random.choice((key, bytes(32), random.randbytes(32)))
            case 1:
                key = random.choice((bytes(32), random.randbytes(32)))
            case 2:
                content = random.choice((*_NUMBERS, random.getrandbits(64)))
            case _:
                last_use = random.choice((*_NUMBERS, random.getrandbits(64)))
        changed = RECORD.pack(prefix, key, content, last_use)
        return changed + checksum_of(changed, slot)


def _place(place: int, value: int) -> bytes:
    return place.to_bytes(4, "little") + bytes([value])


def _damaged(file: int, places: bytes) -> int:
    """Return a copy of a memfd with bytes at places."""
    copy = memfd()
    os.sendfile(copy, file, 0, os.fstat(file).st_size)
    _write_places(copy, places)
    return copy


def _write_places(file: int, places: bytes) -> None:
    """Write bytes at places, modulo the size of the file."""
    size = os.fstat(file).st_size
    for at in range(0, len(places) - _PLACE_BYTES + 1, _PLACE_BYTES):
        place = int.from_bytes(places[at : at + 4], "little")
        os.pwrite(file, places[at + 4 : at + _PLACE_BYTES], place % (size + 1))
