"""Weights in a memfd: filled once, found by all who load the same, and never changed again."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from short_answers import answer, load
from tiny_model import CONFIG, weights, write

from quire.kernels import host
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.trial import TrialRun
from quire.kernels.weights.loader import Loader

MODES: list[dict[str, Any]] = [{}, {"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "int4"}]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = memfd()
    yield fd
    os.close(fd)


def memfd() -> int:
    return os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def mappings(fd: int) -> list[str]:
    """Return the permissions of this process's mappings of the file."""
    inode = os.fstat(fd).st_ino
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [line[1] for line in lines if int(line[4]) == inode]


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "_pack", lambda *_: pytest.fail("packed again"))
    monkeypatch.setattr(TrialRun, "run", lambda *_: pytest.fail("measured inputs again"))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_weights_are_packed_once(
    demo_model: Path, fd: int, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    expected = answer(load(demo_model, **mode))
    first = load(demo_model, weights_fd=fd, **mode)
    whole = content(fd)
    forbid_packing(monkeypatch)
    second = load(demo_model, weights_fd=fd, **mode)
    assert mappings(fd) == ["r--s", "r--s"]
    assert answer(first) == answer(second) == expected
    assert content(fd) == whole


def test_weights_that_are_not_tied_and_tables_are_all_shared(tmp_path: Path, fd: int) -> None:
    tensors = weights()
    write(tmp_path, tensors, CONFIG)
    runner = load(tmp_path, weights_fd=fd)
    (maps,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if "quire-weights" in line]
    first, last = (int(text, 16) for text in maps.split()[0].split("-"))
    loader = runner._assembly.loader
    private = {weight for weight, address in loader.addresses.items() if not first <= address < last}
    assert "lm_head.weight" in tensors
    assert {type(weight).__name__ for weight in loader.addresses.keys() - private} == {"Matrix", "RopeTable"}
    assert {type(weight).__name__ for weight in private} == {"Vector"}


def test_complete_weights_cannot_be_changed(demo_model: Path, fd: int) -> None:
    load(demo_model, weights_fd=fd)
    size = os.fstat(fd).st_size
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    for other in (0, size + 1):
        with pytest.raises(PermissionError):
            os.truncate(fd, other)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, size)


@pytest.mark.parametrize("change", [{"quantization": "int8"}, {"max_model_len": 64}], ids=str)
def test_other_weights_are_left_alone(
    demo_model: Path, fd: int, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = load(demo_model, weights_fd=fd)
    whole, expected = content(fd), answer(before)
    assert answer(load(demo_model, weights_fd=fd, **change)) == answer(load(demo_model, **change))
    assert f"weights_fd={fd} has other weights; those of this engine take memory of their own" in caplog.text
    assert (content(fd), answer(before)) == (whole, expected)
    assert mappings(fd) == ["r--s"]


def test_what_a_killed_engine_has_left_is_not_packed_over(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing leaves the padding as it is, which there is with such a vocabulary. The memory counts as free again."""
    tensors = weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:120]
    write(tmp_path, tensors, {**CONFIG, "vocab_size": 120})
    fresh = memfd()
    load(tmp_path, weights_fd=fresh)
    os.pwrite(fd, b"\xff" * (os.fstat(fresh).st_size + 5), 0)
    available = host.available_memory
    sizes: list[int] = []

    def note_size() -> int:
        sizes.append(os.fstat(fd).st_size)
        return available()

    monkeypatch.setattr(host, "available_memory", note_size)
    load(tmp_path, weights_fd=fd)
    assert sizes[0] == 0
    assert content(fd) == content(fresh)
    os.close(fresh)


def test_the_weight_cache_is_written_from_shared_memory_and_read_into_it(
    demo_model: Path, tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(load(demo_model, weights_fd=fd, weight_cache=str(tmp_path), quantization="int4"))
    (packed,) = tmp_path.iterdir()
    forbid_packing(monkeypatch)
    assert answer(load(demo_model, weight_cache=str(tmp_path), quantization="int4")) == expected
    read = memfd()
    assert answer(load(demo_model, weights_fd=read, weight_cache=str(tmp_path), quantization="int4")) == expected
    assert content(read) == content(fd)
    packed.unlink()
    assert answer(load(demo_model, weights_fd=read, weight_cache=str(tmp_path), quantization="int4")) == expected
    assert [*tmp_path.iterdir()] == []
    os.close(read)


def test_weights_that_are_there_need_no_free_memory(demo_model: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load(demo_model, weights_fd=fd).memory
    monkeypatch.setattr(host, "available_memory", lambda: plan.buffers + plan.kv)
    with pytest.raises(MemoryShortageError, match="are free"):
        load(demo_model)
    assert load(demo_model, weights_fd=fd).memory.limit <= plan.limit


def test_unfit_descriptors_are_rejected(demo_model: Path) -> None:
    read, write = os.pipe()
    unsealable = os.memfd_create("quire-weights")
    for unfit, reason in ((read, "Invalid argument"), (unsealable, "the file has other seals")):
        words = f"weights_fd={unfit}: {reason}; give a memfd with MFD_ALLOW_SEALING that the engine inherits, or leave"
        with pytest.raises(ModelError, match=re.escape(words)):
            load(demo_model, weights_fd=unfit)
    for descriptor in (read, write, unsealable):
        os.close(descriptor)
    with pytest.raises(ModelError, match=f"weights_fd={read}: Bad file descriptor"):
        load(demo_model, weights_fd=read)
