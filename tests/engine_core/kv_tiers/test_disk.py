"""KV read from disk equals the KV that was computed, whatever has happened to the files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_process import MODEL, ROOM, SLOT_BYTES, Process
from engine_watch import wait_until
from engine_without_model import BLOCK_SIZE, LONGEST, PAGE_BYTES, SALTS, Engine, memfd, tokens_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from patience import PATIENCE

from quire.engine_core.kv_tiers.disk import DiskTier
from quire.engine_core.kv_tiers.disk_files import Copy, DiskFiles, FolderInUseError, UnusableFolderError
from quire.engine_core.kv_tiers.tier import Fetch
from quire.protocol.host import Host

PREFIX_BLOCKS = st.lists(st.integers(1, 3), min_size=1, max_size=LONGEST).map(tuple)


class Lives(RuleBasedStateMachine):
    """Processes that come and go, and a folder that is damaged at times."""

    @initialize(num_pages=st.integers(4, 16), room=st.integers(2, 20))
    def start(self, num_pages: int, room: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.options: dict[str, Any] = {"num_pages": num_pages, "room": room * SLOT_BYTES}
        self.process = Process(self.folder, **self.options)

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
        before, self.process = self.process, Process(self.folder / "not yet", **self.options)
        self.process.kill()
        before.kill()
        self.process = Process(self.folder, **self.options)

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
            shutil.rmtree(self.folder)


TestLives = Lives.TestCase


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.kill()


def written(process: Process, *prefixes: tuple[int, ...]) -> None:
    """Compute prefixes, and write them to disk."""
    for blocks in prefixes:
        assert process.engine.compute("", blocks) is not None
    process.close_all()
    process.write()


def test_the_next_process_finds_what_this_one_wrote(process: Process, tmp_path: Path) -> None:
    written(process, (1, 2, 3), (1, 2, 2), (3,))
    process.kill()
    later = Process(tmp_path)
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
    later = Engine(fd, 12, log_sealed_pages=True)
    assert [page[2:4] for page in later.native.take_sealed(9, 0.0)] == [
        page[2:4] for page in process.native.take_sealed(9, 0.0)
    ]
    later.end()


def test_a_page_that_is_written_anew_before_it_is_copied_is_skipped(process: Process) -> None:
    assert process.engine.compute("", (1,)) is not None
    process.close_all()
    sealed = process.native.take_sealed(9, 0.0)
    process.engine.tree.evict(1)
    assert process.engine.compute("", (2,)) is not None
    process.tier.write(sealed)
    assert process.find("", (1,)) == 0
    assert process.tier.stats()["kv_disk_pages_skipped"] == 1
    written(process, (1,))
    assert process.find("", (1,)) == 1


@pytest.mark.parametrize("place", [0, PAGE_BYTES - 1])
def test_a_damaged_page_is_not_taken(process: Process, place: int, caplog: pytest.LogCaptureFixture) -> None:
    written(process, (1, 2, 3))
    slot = list(process.files[0].load())[1].slot
    path = (process.folder / MODEL).with_suffix(".pages")
    data = bytearray(path.read_bytes())
    data[slot * 4096 + place] ^= 1
    path.write_bytes(data)
    process.engine.tree.evict(3)
    assert process.fetch("", (1, 2, 3)) == 1
    process.engine.check()
    assert process.failures == 1
    assert "is damaged" in caplog.text
    written(process, (1, 2, 3))
    process.engine.tree.evict(3)
    assert process.fetch("", (1, 2, 3)) == 3
    process.engine.check()


def test_a_record_in_the_place_of_another_one_does_not_count(process: Process, tmp_path: Path) -> None:
    written(process, (1,), (2,))
    process.kill()
    path = tmp_path / f"{MODEL}.index"
    data = bytearray(path.read_bytes())
    size = (len(data) - 4096) // process.files[0].num_slots
    first, second = slice(4096, 4096 + size), slice(4096 + size, 4096 + 2 * size)
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)
    later = Process(tmp_path)
    assert later.tier.stats()["kv_disk_pages"] == 0
    later.kill()


def test_a_record_used_at_the_end_of_time_does_not_count(process: Process, tmp_path: Path) -> None:
    """Later uses could not be written."""
    written(process, (1,))
    (page,) = process.files[0].load()
    page.last_use = (1 << 64) - 1
    process.files[0].describe(page)
    process.kill()
    later = Process(tmp_path)
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
    assert 0 < later.tier.stats()["kv_disk_pages"] <= 4
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
    assert 6 <= other.tier.stats()["kv_disk_pages"] <= 8
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= ROOM + 4096
    other.kill()
    assert {path.name for path in tmp_path.iterdir()} == {
        "letter.txt",
        *(digit * 32 + suffix for digit in "01" for suffix in (".index", ".pages")),
    }
    later = Process(tmp_path)
    assert 4 <= later.tier.stats()["kv_disk_pages"] <= 6
    for first in (1, 2, 3):
        later.fetch("", (first, 2, 3))
    later.engine.check()
    later.kill()


def test_the_bound_holds_for_engines_that_begin_together(process: Process, tmp_path: Path) -> None:
    other = Process(tmp_path, model="1" * 32)
    assert other.tier.stats()["kv_disk_pages_total"] == 0
    assert process.tier.stats()["kv_disk_pages_total"] == 12
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
    with pytest.raises(FolderInUseError, match="is used by another engine"):
        DiskFiles(tmp_path, ROOM, MODEL, PAGE_BYTES)
    now = 0.0
    tier = DiskTier(lambda: DiskFiles(tmp_path, ROOM, MODEL, PAGE_BYTES), process.native, Host(lambda: now))
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
    with pytest.raises(UnusableFolderError, match="hold no page"):
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
    assert process.tier.stats()["kv_disk_pages_written"] == 2
    process.tier._next_write = 0.0
    process.write()
    assert process.tier.stats()["kv_disk_pages"] == 2  # for which there is room
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


def test_a_read_that_hangs_holds_no_page_and_no_other_request(process: Process, tmp_path: Path) -> None:
    written(process, (1, 2, 3))
    process.engine.tree.evict(3)
    file, begun, go_on = process.files[0], threading.Event(), threading.Event()
    read = file.read

    def hanging(slot: int, copy: Copy) -> None:
        read(slot, copy)
        begun.set()
        assert go_on.wait(PATIENCE)

    file.read = hanging  # type: ignore[method-assign]
    process.tier.start()
    slot = process.sequences.open([*tokens_of((1, 2, 3)), 0], 1, cache_salt="")
    assert process.sequences.start(slot, 3 * BLOCK_SIZE) == 0
    done: list[Fetch] = []
    fetch = Fetch(process.sequences.keys(slot)[1:], process.sequences.pages(slot), done.append)
    process.tier.fetch(fetch)
    assert begun.wait(PATIENCE)
    process.tier.cancel(fetch)
    process.tier.cancel(fetch)
    assert (done, fetch.contents) == ([fetch], [])
    process.sequences.close(slot)
    assert process.find("", (1, 2, 3)) == 0
    assert process.engine.compute("", (3, 3, 3)) is not None  # in the pages of the fetch
    go_on.set()
    wait_until(lambda: process.find("", (1, 2, 3)) == 3, "the read has ended")
    process.engine.check()
    assert len(done) == 1
    assert process.tier.stop()


def test_errors_of_reads_cost_no_page_that_is_intact(process: Process) -> None:
    written(process, (1, 2))
    process.engine.tree.evict(2)
    file = process.files[0]
    read = file.read

    def failing(slot: int, copy: Copy) -> None:
        raise OSError(errno.EIO, "out of luck")

    file.read = failing  # type: ignore[method-assign]
    assert process.fetch("", (1, 2)) == 0
    assert process.failures > 0
    file.read = read  # type: ignore[method-assign]
    assert process.fetch("", (1, 2)) == 2
    process.engine.check()


def test_deleted_files_are_told(process: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(process, (1, 2))
    for path in tmp_path.iterdir():
        path.unlink()
    process.tier.keep_up()
    assert "have been deleted" in caplog.text
    process.engine.tree.evict(2)
    assert process.fetch("", (1, 2)) == 2


def test_what_was_sealed_before_the_folder_could_be_used_is_written(process: Process, tmp_path: Path) -> None:
    engine = Engine(memfd(), 12, log_sealed_pages=True)
    tier = DiskTier(lambda: DiskFiles(tmp_path, ROOM, MODEL, PAGE_BYTES), engine.native)
    tier.start()
    assert engine.compute("", (1, 2, 3)) is not None
    assert tier.stats()["kv_disk_pages"] == 0
    for file in process.files:
        file.close()
    wait_until(lambda: tier.stats()["kv_disk_pages"] == 3, "the pages are written")
    assert tier.stop()
    engine.end()


def test_threads_write_and_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = Process(tmp_path)
    process.tier.start()
    assert process.engine.compute("", (1, 2, 3)) is not None
    wait_until(lambda: process.find("", (1, 2, 3)) == 3, "the pages are written")
    process.close_all()
    process.engine.tree.evict(3)
    slot = process.sequences.open([*tokens_of((1, 2, 3)), 0], 1, cache_salt="")
    assert process.sequences.start(slot, 3 * BLOCK_SIZE) == 0
    done = threading.Event()
    fetch = Fetch(process.sequences.keys(slot)[1:], process.sequences.pages(slot), lambda _: done.set())
    process.tier.fetch(fetch)
    assert done.wait(PATIENCE)
    process.sequences.share(slot, 3 * BLOCK_SIZE, fetch.contents)
    process.engine.check()
    assert process.engine.compute("", (2, 2)) is not None
    assert process.tier.stop()  # which writes what is left
    later = Process(tmp_path)
    assert later.find("", (2, 2)) == 2
    later.kill()
    process.engine.end()


def test_the_lock_goes_with_the_files(process: Process, tmp_path: Path) -> None:
    with (tmp_path / f"{MODEL}.index").open("rb") as file:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pytest.fail("an open folder is not locked")
        process.kill()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
