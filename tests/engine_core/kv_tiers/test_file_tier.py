"""KV read from disk or host memory equals the KV that was computed, whatever has happened to the files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_watch import wait_until
from engine_without_model import BLOCK_SIZE, LONGEST, PAGE_BYTES, SALTS, Engine, memfd, tokens_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from patience import PATIENCE
from tier_process import MODEL, ROOM, SLOT_BYTES, Process

from quire.engine_core.kv_tiers.disk_files import DiskFiles
from quire.engine_core.kv_tiers.file_tier import FileTier
from quire.engine_core.kv_tiers.host_file import DATA_START, HostFile, least_bytes
from quire.engine_core.kv_tiers.page_file import (
    BLOCK_BYTES,
    HEADER_BYTES,
    RECORD_BYTES,
    Copy,
    FileInUseError,
    UnusableFileError,
)
from quire.engine_core.kv_tiers.tier import Fetch
from quire.kernels.kv_file import KvFile
from quire.protocol.host import Host

# Of the file in host memory: where the header, the records and the slots begin, and bytes of each that are in use.
PARTS = ((0, 120), (HEADER_BYTES, 20 * RECORD_BYTES), (DATA_START, 20 * BLOCK_BYTES))
PREFIX_BLOCKS = st.lists(st.integers(1, 3), min_size=1, max_size=LONGEST).map(tuple)


class Lives(RuleBasedStateMachine):
    """Processes that come and go, and a folder that is damaged at times."""

    @initialize(num_pages=st.integers(4, 16), room=st.integers(2, 20))
    def start(self, num_pages: int, room: int) -> None:
        self.options: dict[str, Any] = {"num_pages": num_pages, "room": room * SLOT_BYTES}
        self.begin()
        self.process = Process(self.storage, **self.options)

    def begin(self) -> None:
        """Make the storage."""
        self.folder = Path(tempfile.mkdtemp())
        self.storage: Path | int = self.folder

    @rule(salt=st.sampled_from(SALTS), blocks=PREFIX_BLOCKS)
    def compute(self, salt: str, blocks: tuple[int, ...]) -> None:
        self.process.fetch(salt, blocks)
        self.process.engine.compute(salt, blocks)

    @rule()
    def close(self) -> None:
        self.process.close_all()

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        self.process.engine.tree.evict(count)

    @rule()
    def write(self) -> None:
        self.process.write()

    @rule(salt=st.sampled_from(SALTS), blocks=PREFIX_BLOCKS)
    def fetch(self, salt: str, blocks: tuple[int, ...]) -> None:
        self.process.fetch(salt, blocks)

    @rule()
    def restart(self) -> None:
        self.process.kill()
        self.process = Process(self.storage, **self.options)

    @rule(suffix=st.sampled_from([".pages", ".index"]), place=st.floats(0, 1), change=st.integers(1, 255))
    def damage(self, suffix: str, place: float, change: int) -> None:
        path = (self.folder / MODEL).with_suffix(suffix)
        with path.open("r+b") as file:
            file.seek(int(place * max(0, path.stat().st_size - 1)))
            byte = file.read(1)
            if byte:
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ change]))

    @rule(suffix=st.sampled_from([".pages", ".index"]), place=st.floats(0, 1))
    def truncate(self, suffix: str, place: float) -> None:
        path = (self.folder / MODEL).with_suffix(suffix)
        os.truncate(path, int(place * path.stat().st_size))

    @invariant()
    def accounts(self) -> None:
        self.process.engine.check()

    @invariant()
    def keeps_the_bound(self) -> None:
        used = sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        assert used <= self.options["room"] + 4096

    def teardown(self) -> None:
        if hasattr(self, "process"):
            self.process.kill()
            self.end()

    def end(self) -> None:
        """Delete the storage."""
        shutil.rmtree(self.folder)


class HostLives(Lives):
    """Processes over host memory that is damaged at times, and of which a supervisor keeps nothing at times."""

    def begin(self) -> None:
        """See Lives."""
        self.fd = self.storage = memfd()

    def end(self) -> None:
        """See Lives."""
        os.close(self.fd)

    @rule(part=st.sampled_from(PARTS), place=st.floats(0, 1), change=st.integers(1, 255))
    def damage(self, part: tuple[int, int], place: float, change: int) -> None:
        """Change a byte of the header, of a record or of a slot."""
        start, size = part
        offset = start + int(place * (size - 1))
        for byte in os.pread(self.fd, 1, offset):
            os.pwrite(self.fd, bytes([byte ^ change]), offset)

    @rule(part=st.sampled_from(PARTS), place=st.floats(0, 1))
    def truncate(self, part: tuple[int, int], place: float) -> None:
        start, size = part
        os.truncate(self.fd, min(os.fstat(self.fd).st_size, start + int(place * size)))

    @rule(room=st.integers(2, 20))
    def resize(self, room: int) -> None:
        self.options["room"] = room * SLOT_BYTES
        self.restart()

    @rule()
    def hold_the_pool_of_a_cpu(self) -> None:
        """An engine whose pool lies there has the memory for a while."""
        self.process.kill()
        file = KvFile(self.fd, MODEL)
        assert file.size is None
        file.prepare(4)
        pool = Engine(self.fd, 4)
        assert pool.compute("", (1,)) is not None
        pool.check()
        del pool  # unmaps what is cut off next
        self.process = Process(self.fd, **self.options)
        assert self.process.stat("pages") == 0

    @invariant()
    def keeps_the_bound(self) -> None:
        blocks = HEADER_BYTES + len(PARTS) * BLOCK_BYTES  # of which records take parts
        assert os.fstat(self.fd).st_blocks * 512 <= self.options["room"] + blocks


TestLives = Lives.TestCase
TestHostLives = HostLives.TestCase


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """An engine with a tier on disk."""
    process = Process(tmp_path)
    yield process
    process.kill()


@pytest.fixture(params=["disk", "host"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    """An engine with a tier on disk, or in host memory."""
    storage = tmp_path if request.param == "disk" else memfd()
    process = Process(storage)
    yield process
    process.kill()
    if isinstance(storage, int):
        os.close(storage)


def written(process: Process, *prefixes: tuple[int, ...]) -> None:
    """Compute prefixes, and write them to disk."""
    for blocks in prefixes:
        assert process.engine.compute("", blocks) is not None
    process.close_all()
    process.write()


def test_the_next_process_finds_what_this_one_wrote(either: Process) -> None:
    written(either, (1, 2, 3), (1, 2, 2), (3,))
    either.kill()
    later = Process(either.storage)
    assert [later.find("", blocks) for blocks in [(1, 2, 3), (1, 2, 2), (3, 1), (2,)]] == [3, 3, 1, 0]
    assert later.find("tenant", (1, 2, 3)) == 0
    assert (later.fetch("", (1, 2, 3)), later.fetch("", (1, 2, 2))) == (3, 1)
    later.engine.check()
    assert later.engine.tree.size == 4
    later.kill()


def test_pages_that_memory_has_kept_through_a_crash_are_written_too(process: Process, tmp_path: Path) -> None:
    """Sealed pages that are not written yet are in the memory that the next engine takes over."""
    assert process.engine.compute("", (1, 2)) is not None
    fd = process.engine.copy()
    later = Engine(fd, 12, sealed_queues=1)
    (queue,) = later.native.sealed_queues
    assert [key for _, _, key, _ in queue.take(9, 0.0)] == [key for _, _, key, _ in process.sealed.take(9, 0.0)]
    later.end()


def test_a_page_that_is_written_anew_before_it_is_copied_is_skipped(either: Process) -> None:
    assert either.engine.compute("", (1,)) is not None
    either.close_all()
    sealed = either.sealed.take(9, 0.0)
    ((page, _, _, seal),) = sealed
    assert either.sealed.is_sealed(page, seal)
    either.engine.tree.evict(1)
    assert not either.sealed.is_sealed(page, seal)
    assert either.engine.compute("", (2,)) is not None
    assert not any(either.sealed.is_sealed(number, seal) for number in (-1, page, 1 << 20))
    either.tier.write(sealed)
    assert either.find("", (1,)) == 0
    assert either.stat("pages_skipped") == 1
    written(either, (1,))
    assert either.find("", (1,)) == 1


@pytest.mark.parametrize("place", [0, PAGE_BYTES - 1])
def test_a_damaged_page_is_not_taken(either: Process, place: int, caplog: pytest.LogCaptureFixture) -> None:
    written(either, (1, 2, 3))
    file = either.files[0]
    offset = file._offset(list(file.load())[1].slot) + place
    os.pwrite(file._data, bytes([os.pread(file._data, 1, offset)[0] ^ 1]), offset)
    either.engine.tree.evict(3)
    assert either.fetch("", (1, 2, 3)) == 1
    either.engine.check()
    assert either.failures == 1
    assert "is damaged" in caplog.text
    written(either, (1, 2, 3))
    either.engine.tree.evict(3)
    assert either.fetch("", (1, 2, 3)) == 3
    either.engine.check()


def test_a_record_in_the_place_of_another_one_does_not_count(either: Process) -> None:
    written(either, (1,), (2,))
    index = either.files[0]._index
    records = os.pread(index, 2 * RECORD_BYTES, HEADER_BYTES)
    os.pwrite(index, records[RECORD_BYTES:] + records[:RECORD_BYTES], HEADER_BYTES)
    either.kill()
    later = Process(either.storage)
    assert later.stat("pages") == 0
    later.kill()


def test_a_record_used_at_the_end_of_time_does_not_count(either: Process) -> None:
    """Later uses could not be written."""
    written(either, (1,))
    (page,) = either.files[0].load()
    page.last_use = (1 << 64) - 1
    either.files[0].describe(page)
    either.kill()
    later = Process(either.storage)
    assert later.find("", (1,)) == 0
    written(later, (1,))
    assert later.find("", (1,)) == 1
    later.kill()


def damage_header(folder: Path) -> None:
    with (folder / f"{MODEL}.index").open("r+b") as file:
        file.write(b"rubbish")


def nest_header(folder: Path) -> None:
    with (folder / f"{MODEL}.index").open("r+b") as file:
        file.write(b'{"version":' + b"[" * 4000)


def damage_name(folder: Path) -> None:
    with (folder / f"{MODEL}.index").open("r+b") as file:
        file.seek(file.read(100).index(b"000"))
        file.write(b"\xff")


def empty_both(folder: Path) -> None:
    for path in folder.iterdir():
        os.truncate(path, 0)


@pytest.mark.parametrize("spoil", [damage_header, nest_header, damage_name, empty_both, shutil.rmtree])
def test_it_begins_anew_where_there_is_nothing_to_go_on_with(
    process: Process, tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    written(process, (1, 2))
    process.kill()
    spoil(tmp_path)
    later = Process(tmp_path)
    assert later.find("", (1, 2)) == 0
    is_damaged = spoil in (damage_header, nest_header, damage_name)
    assert ("are discarded" in caplog.text) == is_damaged
    assert later.failures == is_damaged
    written(later, (1, 2))
    assert later.find("", (1, 2)) == 2
    later.kill()


def test_a_smaller_bound_is_kept(process: Process, tmp_path: Path) -> None:
    written(process, (1, 2, 3), (2, 2, 3), (3, 2, 3))
    process.kill()
    later = Process(tmp_path, room=4 * SLOT_BYTES)
    assert 0 < later.stat("pages") <= 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * SLOT_BYTES + 4096
    later.fetch("", (1, 2, 3))
    later.engine.check()
    later.kill()


def test_other_models_leave_half_of_the_space(process: Process, tmp_path: Path) -> None:
    written(process, (1, 2, 3), (2, 2, 3), (3, 2, 3))
    process.kill()
    (tmp_path / "letter.txt").write_text("not ours")
    (tmp_path / ("2" * 32 + ".index")).write_text("nobody's")
    other = Process(tmp_path, model="1" * 32)
    for first in (1, 2, 3):
        written(other, (first, 1), (first, 2), (first, 3))
    assert 6 <= other.stat("pages") <= 8
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= ROOM + 4096
    other.kill()
    assert {path.name for path in tmp_path.iterdir()} == {
        "letter.txt",
        *(digit * 32 + suffix for digit in "01" for suffix in (".index", ".pages")),
    }
    later = Process(tmp_path)
    assert 4 <= later.stat("pages") <= 6
    for first in (1, 2, 3):
        later.fetch("", (first, 2, 3))
    later.engine.check()
    later.kill()


def test_the_bound_holds_for_engines_that_begin_together(process: Process, tmp_path: Path) -> None:
    other = Process(tmp_path, model="1" * 32)
    assert other.stat("pages_total") == 0
    assert process.stat("pages_total") == 12
    assert other.failures == 1
    other.kill()
    written(process, (1, 2, 3))
    process.engine.tree.evict(9)
    assert process.fetch("", (1, 2, 3)) == 3
    process.engine.check()


def test_the_files_of_an_engine_that_still_ends_are_waited_for(
    process: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(process, (1, 2))
    with pytest.raises(FileInUseError, match="is used by another engine"):
        DiskFiles(tmp_path, ROOM, MODEL, PAGE_BYTES)
    now = 0.0
    tier = FileTier(
        "disk",
        lambda: DiskFiles(tmp_path, ROOM, MODEL, PAGE_BYTES),
        process.native,
        process.sealed,
        Host(lambda: now),
    )
    assert tier.stats()["kv_disk_pages_total"] == 0
    tier.open()
    tier.open()
    assert caplog.text.count("waiting for it to end") == 1
    for file in process.files:
        file.close()
    now = 10.0
    tier.open()
    assert tier.stats()["kv_disk_pages"] == 2
    tier.start()
    assert tier.stop()


def test_a_folder_that_cannot_be_used_leaves_the_engine_without_a_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    process = Process(tmp_path / "file")
    written(process, (1,))
    assert process.find("", (1,)) == 0
    assert process.failures == 1
    assert "going on without it" in caplog.text
    process.kill()


def test_a_bound_below_a_page_is_told(tmp_path: Path, process: Process) -> None:
    with pytest.raises(UnusableFileError, match="hold no page"):
        DiskFiles(tmp_path / "small", 100, MODEL, PAGE_BYTES)


def test_a_full_disk_is_told_once_and_what_is_there_can_be_read(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    written(process, (1, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        written(process, (3, 2, 1), (2, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("writing failed") == 1
    assert process.failures == 1
    assert process.stat("pages_written") == 2
    process.tier._next_write = 0.0
    process.write()
    assert process.stat("pages") == 2  # for which there is room
    assert process.find("", (2, 2)) == 2
    process.engine.tree.evict(9)
    assert process.fetch("", (2, 2)) == 2
    process.engine.check()


@pytest.mark.parametrize("page_bytes", [0, -4096])
def test_files_of_another_model_with_impossible_pages_are_deleted(
    process: Process, tmp_path: Path, page_bytes: int
) -> None:
    process.kill()
    index = tmp_path / ("2" * 32 + ".index")
    index.write_text(f'{{"version":1,"model":"{index.stem}","page_bytes":{page_bytes}}}\n')
    index.with_suffix(".pages").write_bytes(bytes(ROOM))
    later = Process(tmp_path)
    written(later, (1,))
    assert later.find("", (1,)) == 1
    assert {path.stem for path in tmp_path.iterdir()} == {MODEL}
    later.kill()


def test_fewer_slots_of_host_memory_keep_their_pages() -> None:
    """What is beyond them does not come back when there are more again."""
    fd = memfd()
    process = Process(fd)
    written(process, (1, 2, 3), (2, 2, 3), (3, 2, 3))
    for slots, num_pages in ((4, 4), (12, 4)):
        process.kill()
        process = Process(fd, room=slots * SLOT_BYTES)
        assert (process.stat("pages"), process.stat("pages_total")) == (num_pages, slots)
    assert process.find("", (1, 2, 3)) == process.fetch("", (1, 2, 3)) == 3
    process.engine.check()
    assert process.failures == 0
    process.kill()
    os.close(fd)


def test_pages_of_another_model_are_discarded_from_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fd = memfd()
    process = Process(fd)
    written(process, (1, 2, 3))
    process.kill()
    assert "are discarded" not in caplog.text
    other = Process(fd, model="1" * 32)
    assert (other.stat("pages"), other.failures) == (0, 0)
    assert "the KV pages of another model or device are discarded" in caplog.text
    written(other, (2,))
    other.kill()
    later = Process(fd)
    assert later.find("", (1, 2, 3)) == later.find("", (2,)) == 0
    later.kill()
    os.close(fd)


def test_host_memory_that_another_engine_uses_is_not_touched() -> None:
    fd = memfd()
    process = Process(fd)
    written(process, (1, 2))
    process.kill()
    code = (
        "import sys; from quire.engine_core.kv_tiers.host_file import HostFile;"
        f"file = HostFile({fd}, {ROOM}, {MODEL!r}, {PAGE_BYTES}); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()
        with pytest.raises(FileInUseError, match="is used by another engine"):
            HostFile(fd, ROOM, "1" * 32, PAGE_BYTES)
        user.kill()
    later = Process(fd)
    assert later.find("", (1, 2)) == 2
    later.kill()
    os.close(fd)


def test_host_memory_that_holds_no_page_or_cannot_be_used_is_told(tmp_path: Path) -> None:
    fd = memfd()
    with pytest.raises(UnusableFileError, match="8 bytes hold no page, which takes 4184; give more"):
        HostFile(fd, 8, MODEL, PAGE_BYTES)
    HostFile(fd, least_bytes(PAGE_BYTES), MODEL, PAGE_BYTES)
    os.close(fd)
    with pytest.raises(UnusableFileError, match="host memory of KV pages: Bad file descriptor"):
        HostFile(fd, ROOM, MODEL, PAGE_BYTES)


def test_two_tiers_get_every_page(tmp_path: Path) -> None:
    engine, fd = Engine(memfd(), 12, sealed_queues=2), memfd()
    kv, (first, second) = engine.native, engine.native.sealed_queues
    host = FileTier("host", lambda: HostFile(fd, ROOM, MODEL, PAGE_BYTES), kv, first)
    disk = FileTier("disk", lambda: DiskFiles(tmp_path, ROOM, MODEL, PAGE_BYTES), kv, second)
    assert engine.compute("", (1, 2, 3)) is not None
    for tier in (host, disk):
        tier.start()
    wait_until(lambda: host.stats()["kv_host_pages"] == disk.stats()["kv_disk_pages"] == 3, "the pages are written")
    for tier in (host, disk):
        assert tier.stop()
    engine.end()
    os.close(fd)


def test_a_read_that_hangs_holds_no_page_and_no_other_request(either: Process) -> None:
    written(either, (1, 2, 3))
    either.engine.tree.evict(3)
    file, begun, go_on = either.files[0], threading.Event(), threading.Event()
    read = file.read

    def hanging(slot: int, copy: Copy) -> None:
        read(slot, copy)
        begun.set()
        assert go_on.wait(PATIENCE)

    file.read = hanging  # type: ignore[method-assign]
    either.tier.start()
    slot = either.sequences.open([*tokens_of((1, 2, 3)), 0], 1, cache_salt="")
    assert either.sequences.start(slot, 3 * BLOCK_SIZE) == 0
    done: list[Fetch] = []
    fetch = Fetch(either.sequences.keys(slot)[1:], either.sequences.pages(slot), done.append)
    either.tier.fetch(fetch)
    assert begun.wait(PATIENCE)
    either.tier.cancel(fetch)
    either.tier.cancel(fetch)
    assert (done, fetch.contents) == ([fetch], [])
    either.sequences.close(slot)
    assert either.find("", (1, 2, 3)) == 0
    assert either.engine.compute("", (3, 3, 3)) is not None  # in the pages of the fetch
    go_on.set()
    wait_until(lambda: either.find("", (1, 2, 3)) == 3, "the read has ended")
    either.engine.check()
    assert len(done) == 1
    assert either.tier.stop()


def test_errors_of_reads_cost_no_page_that_is_intact(either: Process) -> None:
    written(either, (1, 2))
    either.engine.tree.evict(2)
    file = either.files[0]
    read = file.read

    def failing(slot: int, copy: Copy) -> None:
        raise OSError(errno.EIO, "out of luck")

    file.read = failing  # type: ignore[method-assign]
    assert either.fetch("", (1, 2)) == 0
    assert either.failures > 0
    file.read = read  # type: ignore[method-assign]
    assert either.fetch("", (1, 2)) == 2
    either.engine.check()


def test_deleted_files_are_told(process: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(process, (1, 2))
    for path in tmp_path.iterdir():
        path.unlink()
    process.tier.keep_up()
    assert "have been deleted" in caplog.text
    process.engine.tree.evict(2)
    assert process.fetch("", (1, 2)) == 2


def test_what_was_sealed_before_the_folder_could_be_used_is_written(process: Process, tmp_path: Path) -> None:
    engine = Engine(memfd(), 12, sealed_queues=1)
    sealed = engine.native.sealed_queues[0]
    tier = FileTier("disk", lambda: DiskFiles(tmp_path, ROOM, MODEL, PAGE_BYTES), engine.native, sealed)
    tier.start()
    assert engine.compute("", (1, 2, 3)) is not None
    assert tier.stats()["kv_disk_pages"] == 0
    for file in process.files:
        file.close()
    wait_until(lambda: tier.stats()["kv_disk_pages"] == 3, "the pages are written")
    assert tier.stop()
    engine.end()


def test_threads_write_and_read(either: Process, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    either.tier.start()
    assert either.engine.compute("", (1, 2, 3)) is not None
    wait_until(lambda: either.find("", (1, 2, 3)) == 3, "the pages are written")
    either.close_all()
    either.engine.tree.evict(3)
    slot = either.sequences.open([*tokens_of((1, 2, 3)), 0], 1, cache_salt="")
    assert either.sequences.start(slot, 3 * BLOCK_SIZE) == 0
    done = threading.Event()
    fetch = Fetch(either.sequences.keys(slot)[1:], either.sequences.pages(slot), lambda _: done.set())
    either.tier.fetch(fetch)
    assert done.wait(PATIENCE)
    either.sequences.share(slot, 3 * BLOCK_SIZE, fetch.contents)
    either.engine.check()
    assert either.engine.compute("", (2, 2)) is not None
    assert either.tier.stop()  # which writes what is left
    later = Process(either.storage)
    assert later.find("", (2, 2)) == 2
    later.kill()
    assert f"{either.name} tier: 5 of 12 pages are there" in caplog.text


def test_the_lock_goes_with_the_files(process: Process, tmp_path: Path) -> None:
    with (tmp_path / f"{MODEL}.index").open("rb") as file:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pytest.fail("an open folder is not locked")
        process.kill()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
