"""KV pages outlive the process that computed them: all that the prefix cache held is found again, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import engine_without_model
import pytest
from engine_without_model import (
    BLOCK_SIZE,
    LONGEST,
    PAGE_BYTES,
    RUNS,
    SALTS,
    Engine,
    content,
    memfd,
    tokens_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from patience import PATIENCE

from quire.kernels._native import HUGE_PAGE
from quire.kernels.errors import ModelError
from quire.kernels.kv_file import KvFile
from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, SamplingConfig, load_model
from quire.kernels.step import StepInput

HEADER_BYTES, RECORD_BYTES = 4096, 64


def poke(fd: int, offset: int) -> None:
    """Change one byte of the file."""
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ 0x10]), offset)


def offsets_of(page: int, num_pages: int) -> dict[str, int]:
    """Return an offset in the file for each of the parts of a page's account."""
    record, tokens = HEADER_BYTES + page * RECORD_BYTES, HEADER_BYTES + num_pages * RECORD_BYTES
    tiles = -(-(tokens + num_pages * BLOCK_SIZE * 4) // HUGE_PAGE) * HUGE_PAGE
    return {
        "state": record,
        "parent": record + 4,
        "checksum": record + 16,
        "key": record + 24 + 31,
        "token": tokens + page * BLOCK_SIZE * 4 + 60,
        "first tile": tiles + page * RUNS[0][2],
        "last tile": tiles + num_pages * PAGE_BYTES - (num_pages - page - 1) * RUNS[-1][2] - 1,
    }


class Lives(RuleBasedStateMachine):
    """Engines that crash at any time, each of which goes on with the memory of the one before."""

    @initialize(num_pages=st.integers(4, 16))
    def start(self, num_pages: int) -> None:
        self.engine = Engine(memfd(), num_pages)

    @rule(salt=st.sampled_from(SALTS), blocks=st.lists(st.integers(1, 3), min_size=1, max_size=LONGEST))
    def compute(self, salt: str, blocks: list[int]) -> None:
        self.engine.compute(salt, tuple(blocks))

    @rule(index=st.integers(0, 10))
    def close(self, index: int) -> None:
        if index < len(self.engine.slots):
            self.engine.sequences.close(self.engine.slots.pop(index))

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        self.engine.tree.evict(count)

    @rule()
    def crash(self) -> None:
        before, self.engine = self.engine, self.engine.crash()
        assert self.engine.pages() == before.pages()
        assert self.engine.native.num_taken_over_pages == before.tree.size
        assert self.engine.native.num_dropped_pages == 0
        assert self.engine.sequences.held_pages == 0
        before.end()

    @precondition(lambda self: self.engine.tree.size > 0)
    @rule(data=st.data())
    def crash_and_damage(self, data: st.DataObject) -> None:
        before, pages = self.engine, self.engine.pages()
        salt, blocks = data.draw(st.sampled_from(sorted(pages)))
        offsets = offsets_of(pages[salt, blocks], before.num_pages)
        part = data.draw(st.sampled_from(sorted(offsets)))
        fd = before.copy()
        poke(fd, offsets[part])
        self.engine = Engine(fd, before.num_pages)
        left = {p: n for p, n in pages.items() if p[0] != salt or p[1][: len(blocks)] != blocks}
        assert self.engine.pages() == left
        assert self.engine.native.num_dropped_pages == len(pages) - len(left) - (part == "state")
        before.end()

    @precondition(lambda self: not self.engine.slots)
    @rule(count=st.integers(1, 8))
    def crash_and_evict(self, count: int) -> None:
        """The order of eviction survives."""
        before, self.engine = self.engine, self.engine.crash()
        for _ in range(count):
            before.tree.evict(1)
            self.engine.tree.evict(1)
            assert self.engine.pages() == before.pages()
        before.end()

    @invariant()
    def accounts(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        self.engine.end()


Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestLives = Lives.TestCase


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(memfd(), 4)
    yield made
    made.end()


def test_a_page_that_is_rewritten_is_not_taken_over(engine: Engine) -> None:
    engine.compute("", (1, 2, 3))
    engine.sequences.close(engine.slots.pop())
    assert engine.open("", (2, 2, 2)) is not None  # in the same pages, and not computed to the end
    assert engine.crash().pages() == {}
    assert engine.crash().native.num_dropped_pages == 0


def test_pages_that_sequences_held_were_used_last(engine: Engine) -> None:
    engine.compute("", (1,))
    engine.compute("", (2,))
    engine.sequences.close(engine.slots.pop())
    after = engine.crash()
    after.tree.evict(1)
    assert set(after.pages()) == {("", (1,))}


def test_a_page_of_another_prefix_is_not_taken_over(engine: Engine) -> None:
    """A child whose parent's page holds something else by now, all checksums being right."""
    engine.compute("", (1, 2))
    engine.sequences.close(engine.slots.pop())
    pages = engine.pages()
    other = Engine(memfd(), engine.num_pages)
    other.compute("", (3, 2))
    assert other.pages()["", (3,)] == pages["", (1,)]
    record = HEADER_BYTES + pages["", (1, 2)] * RECORD_BYTES
    os.pwrite(other.fd, os.pread(engine.fd, RECORD_BYTES, record), record)  # same tokens
    other.write(pages["", (1, 2)], content(("", (1, 2))))
    after = other.crash()
    assert set(after.pages()) == {("", (3,))}
    assert after.native.num_dropped_pages == 1
    other.end()


def test_another_salt_finds_nothing(engine: Engine) -> None:
    engine.compute("tenant", (1, 2))
    after = engine.crash()
    assert set(after.pages()) == {("tenant", (1,)), ("tenant", (1, 2))}
    slot = after.sequences.open([*tokens_of((1, 2)), 0], 65, cache_salt="Tenant")
    assert after.sequences.match(slot)[0] == 0
    assert b"tenant" not in os.pread(engine.fd, HUGE_PAGE, 0)


def test_another_model_finds_nothing(engine: Engine) -> None:
    """Its keys differ, even where the header of the file fails to say so."""
    engine.compute("", (1, 2))
    after = Engine(engine.copy(), engine.num_pages, model="other")
    assert after.pages() == {}
    assert after.tree.evict(4) == 2


def test_a_process_killed_at_any_time_leaves_right_pages() -> None:
    """The engine computes and evicts as fast as it can, so that it dies amid writing, sealing or evicting."""
    choose, taken_over = random.Random(1), 0
    fd, num_pages = os.memfd_create("kv"), 24
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, engine_without_model.__file__, str(fd), str(num_pages)],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        for _ in range(choose.randrange(1, 60)):
            assert process.stdout.readline() == b"\n"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE)
        after = Engine(fd, num_pages)
        after.check()
        assert after.native.num_dropped_pages == 0
        taken_over += after.native.num_taken_over_pages
    assert taken_over > 0
    os.close(fd)


def answer(engine: ModelRunner, salt: str = "") -> tuple[int | None, list[object]]:
    """Return the number of cached tokens of a prompt, and its tokens with their log probabilities."""
    sequences, prompt = engine.sequences, [*range(1, 150)]
    slot = sequences.open(prompt, len(prompt), sampling=SamplingConfig(seed=3, logprobs=2), cache_salt=salt)
    cached = sequences.start(slot, len(prompt) + 60)
    assert cached is not None
    entries: list[object] = []
    for start in (cached, *range(149, 209)):
        result = engine.run(StepInput([slot], [start], [sequences.num_tokens(slot) - start]))
        entries += [*zip(result.token_ids[0], result.logprobs(0) or [], strict=True)]
    sequences.close(slot)
    return cached, entries


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("", {}),
        ("", {"dtype": "float32"}),
        ("", {"kv_cache_dtype": "int8", "block_size": 64}),
        ("gemma4-keys-as-values", {}),  # whose layers have KV of different sizes
        ("gemma4-shared-window100", {"kv_cache_dtype": "int8"}),
    ],
    ids=str,
)
def test_a_loaded_model_goes_on_with_the_same_bits(
    demo_model: Path, checkpoints: Path, name: str, chosen: dict[str, object]
) -> None:
    fd, folder = memfd(), str(checkpoints / name if name else demo_model)
    expected = answer(load_model(LoadOptions(folder, num_pages=40, threads=2, **chosen)))  # type: ignore[arg-type]

    def load(**others: object) -> ModelRunner:
        options = {"num_pages": 40, "threads": 2, **chosen, **others}
        return load_model(LoadOptions(folder, kv_memory_fd=fd, **options))  # type: ignore[arg-type]

    assert answer(load(), "salt")[1] == expected[1]
    after = load()
    assert after.num_taken_over_pages == 208 // after.block_size
    assert after.num_pages == 40
    assert answer(after, "salt") == (148 // after.block_size * after.block_size, expected[1])
    assert answer(after, "other")[0] == 0
    for other in ({"quantization": "int8"}, {"hf_overrides": '{"rms_norm_eps": 0.125}'}):
        assert load(**other).num_taken_over_pages == 0
        answer(load(**other), "salt")
    assert load().num_taken_over_pages == 0
    os.close(fd)


def test_a_pool_keeps_its_size(demo_model: Path) -> None:
    """By default it depends on the memory that is free, of which the pool itself has taken some."""
    fd = memfd()
    num_pages = load_model(LoadOptions(str(demo_model), max_num_seqs=1, kv_memory_fd=fd)).num_pages
    assert load_model(LoadOptions(str(demo_model), max_num_seqs=2, kv_memory_fd=fd)).num_pages == num_pages
    assert load_model(LoadOptions(str(demo_model), max_num_seqs=2)).num_pages == 2 * num_pages
    os.close(fd)


def test_kv_of_another_model_or_size_is_discarded() -> None:
    fd = memfd()
    file = KvFile(fd, "model")
    assert file.size is None
    file.prepare(20)
    os.pwrite(fd, b"KV", HEADER_BYTES)
    file = KvFile(fd, "model")
    assert file.size == (20, 0)
    file.prepare(20)
    assert os.pread(fd, 2, HEADER_BYTES) == b"KV"
    file.prepare(21)
    assert os.pread(fd, 2, HEADER_BYTES) == b""
    assert KvFile(fd, "model").size == (21, 0)
    other = KvFile(fd, "other")
    assert other.size is None
    os.pwrite(fd, b"KV", HEADER_BYTES)
    other.prepare(21)
    assert os.pread(fd, 2, HEADER_BYTES) == b""
    for line in (b"something else", b'{"model": "\xff", "num_pages": 1}'):
        os.pwrite(fd, line, 0)
        assert KvFile(fd, "model").size is None
    os.close(fd)


def test_memory_that_another_engine_uses_is_rejected() -> None:
    fd = os.memfd_create("kv")
    code = (
        "import sys; from quire.kernels.kv_file import KvFile; KvFile(int(sys.argv[1]), 'model').prepare(1);"
        "print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(ModelError, match=f"kv_memory_fd={fd} is used by another engine; end that one"):
        KvFile(fd, "other").prepare(1)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert KvFile(fd, "model").size == (1, 0)
    os.close(fd)


def test_an_unfit_descriptor_is_rejected(demo_model: Path) -> None:
    read, write = os.pipe()
    with pytest.raises(ModelError, match=rf"kv_memory_fd={read}: .*; give a memfd that the engine inherits"):
        load_model(LoadOptions(str(demo_model), num_pages=8, kv_memory_fd=read))
    os.close(read)
    os.close(write)
    with pytest.raises(ModelError, match=rf"kv_memory_fd={read}: Bad file descriptor"):
        load_model(LoadOptions(str(demo_model), num_pages=8, kv_memory_fd=read))
