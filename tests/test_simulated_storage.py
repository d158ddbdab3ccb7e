"""The simulated storage itself: what it keeps, what it loses, and what it notices."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fault_simulation.disk import Disk, ProcessDisk
from fault_simulation.storage import ProcessMemory, Storage, disk_bytes
from fault_simulation.world import Process, Thread, World

from quire.engine_core.kv_tiers.disk_files import DiskFiles
from quire.engine_core.kv_tiers.page_file import UnusableFileError
from quire.protocol.engine_shape import EngineShape

LIMITS = EngineShape(
    vocab_size=300,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    block_size=4,
    num_pages=24,
    hidden_size=4,
)
FLAGS = os.O_RDWR | os.O_CREAT


@pytest.fixture
def world() -> World:
    return World(5)


@pytest.fixture
def disk(world: World, tmp_path: Path) -> Disk:
    return Disk(world, tmp_path, 0.01)


@pytest.fixture
def kept() -> Iterator[int]:
    descriptor = os.memfd_create("kept")
    yield descriptor
    os.close(descriptor)


def run_in(process: Process, work: Callable[[], None]) -> None:
    """Run in a thread of the process until it ends, or the process does."""
    thread = Thread(process, "test", work)
    thread.start()
    world = process.world
    assert world.run(lambda: not thread.is_alive() or not process.is_alive, world.now + 1000.0), world.problems


def write_both(own: ProcessDisk, descriptor: int) -> None:
    """Write to two sectors, twice."""
    own.pwrite(descriptor, b"b" * 700, 100)
    own.pwrite(descriptor, b"c" * 700, 100)


def test_a_dead_process_leaves_what_it_has_written_and_its_lock(world: World, disk: Disk) -> None:
    process = Process(world, "first")
    files: list[DiskFiles] = []

    def use() -> None:
        files.append(DiskFiles(disk.folder, disk_bytes(4), "0" * 32, 16, ProcessDisk(process, disk)))
        files[0]._disk.pwrite(files[0]._data, b"abc", 5)

    run_in(process, use)
    with pytest.raises(UnusableFileError, match="is used by another engine"):
        DiskFiles(disk.folder, disk_bytes(4), "0" * 32, 16)
    process.kill("test")
    DiskFiles(disk.folder, disk_bytes(4), "0" * 32, 16).close()
    assert (disk.folder / f"{'0' * 32}.pages").read_bytes() == b"\0\0\0\0\0abc"


def test_a_torn_write_leaves_its_first_bytes_and_ends_the_process(world: World, disk: Disk) -> None:
    process, path = Process(world, "first"), disk.folder / "file"
    disk.num_torn = 1

    def write() -> None:
        own = ProcessDisk(process, disk)
        own.pwrite(own.open(path, FLAGS, 0o600), b"x" * 100, 0)
        raise AssertionError("it has survived")

    run_in(process, write)
    assert not process.is_alive
    assert 0 <= path.stat().st_size < 100
    assert world.problems == []


def test_power_that_fails_takes_back_whole_sectors_up_to_some_write(world: World, disk: Disk) -> None:
    path, seen = disk.folder / "file", set()
    for _ in range(200):
        path.write_bytes(b"a" * 1024)
        process = Process(world, "engine")
        own = ProcessDisk(process, disk)
        descriptor = own.open(path, FLAGS, 0o600)
        run_in(process, partial(write_both, own, descriptor))
        own.close(descriptor)
        assert disk.cut_power()
        sectors = path.read_bytes()[:512], path.read_bytes()[512:]
        assert all(len(set(sector) - {ord("a")}) <= 1 for sector in sectors)
        seen.add(tuple(bytes({max(sector)}) for sector in sectors))
    assert seen == {(first, second) for first in (b"a", b"b", b"c") for second in (b"a", b"b", b"c")}
    assert not disk.cut_power()


def test_operations_fail_take_time_and_flip_bits_as_they_are_told(world: World, disk: Disk) -> None:
    process, path = Process(world, "engine"), disk.folder / "file.pages"
    own = ProcessDisk(process, disk)
    descriptor = own.open(path, FLAGS, 0o600)
    buffer = bytearray(64)

    def use() -> None:
        own.pwrite(descriptor, bytes(64), 0)
        disk.write_error = errno.ENOSPC
        with pytest.raises(OSError, match="No space left"):
            own.pwrite(descriptor, b"x", 0)
        disk.num_flips = 1
        assert own.preadv(descriptor, [memoryview(buffer)], 0) == 64
        disk.heal()
        assert own.pread(descriptor, 64, 0) == bytes(64)

    run_in(process, use)
    assert sum(each.bit_count() for each in buffer) == 1
    assert 0.01 < world.now < 0.05
    disk.is_hanging = True
    run = Thread(process, "reader", partial(own.truncate, descriptor, 1))
    run.start()
    assert not world.run(lambda: not run.is_alive(), world.now + 100.0)
    process.kill("test")


def test_memory_passes_to_the_next_process_as_it_is_when_this_one_dies(world: World, kept: int) -> None:
    storage = Storage(world, LIMITS, None, 0, keeps_memory=True)
    tokens, sealed = list(range(9)), []
    for life in range(3):
        process = Process(world, f"engine {life}")
        memory = ProcessMemory(process, storage, kept)
        sequences = memory.pages.sequences
        slot = sequences.open(tokens, len(tokens), cache_salt="")
        assert sequences.start(slot, len(tokens)) == (8 if life == 1 else 0)
        if life == 0:
            memory.bytes[:] = bytes(range(256)) * (len(memory.bytes) // 256) + bytes(len(memory.bytes) % 256)
            sequences.share(slot, len(tokens))
            memory.seal()
            assert (sealed := memory.take(9, 0.0))
        elif life == 1:
            assert [page[1:3] for page in memory.take(9, 0.0)] == [page[1:3] for page in sealed]
            page = sequences.pages(slot)[0]
            memory.bytes[page * memory.page_bytes] ^= 1  # of a sealed page
        else:
            assert memory.pages.num_dropped_pages == 2
        process.kill("test")
        memory.bytes[:] = bytes(len(memory.bytes))  # by what is left of the process
