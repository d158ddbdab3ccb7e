"""The thread pool runs everything on every thread, survives exceptions, rests when idle, and counts CPUs right."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from quire.kernels import _native

SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pin", [False, True])
def test_every_thread_runs_once_a_launch(size: int, pin: bool) -> None:
    pool = _native.ThreadPool(size, pin)
    assert pool.size == size
    threads: dict[int, set[int]] = {thread: set() for thread in range(size)}
    counts = [0] * size

    def count(thread: int) -> None:
        threads[thread].add(threading.get_ident())
        counts[thread] += 1

    for _ in range(200):
        pool.run(count)
    assert counts == [200] * size
    assert threads[0] == {threading.get_ident()}
    assert all(len(idents) == 1 for idents in threads.values())
    assert len(set.union(*threads.values())) == size


def test_pinning_leaves_the_affinity_of_the_caller() -> None:
    before = os.sched_getaffinity(0)
    pool = _native.ThreadPool(min(2, len(before)), pin=True)
    masks: list[set[int]] = []
    pool.run(lambda thread: masks.append(os.sched_getaffinity(0)))
    assert pool.pinned
    assert sorted(len(mask) for mask in masks) == [1] * pool.size
    assert len(set.union(*masks)) == pool.size
    assert os.sched_getaffinity(0) == before


def test_more_threads_than_cpus_are_not_pinned() -> None:
    pool = _native.ThreadPool(len(os.sched_getaffinity(0)) + 1, pin=True)
    assert not pool.pinned
    pool.run(lambda thread: None)


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_holds_everyone_until_the_last_has_come(size: int) -> None:
    pool = _native.ThreadPool(size)
    arrived = [0] * size
    wrong: list[list[int]] = []

    def work(thread: int) -> None:
        for step in range(1, 51):
            arrived[thread] = step
            pool.barrier(thread)
            if arrived != [step] * size:
                wrong.append(list(arrived))
            pool.barrier(thread)

    pool.run(work)
    assert wrong == []


@pytest.mark.parametrize("size", SIZES)
def test_an_exception_of_any_thread_reaches_the_caller(size: int) -> None:
    pool = _native.ThreadPool(size)
    for culprit in range(size):

        def fail(thread: int, culprit: int = culprit) -> None:
            if thread == culprit:
                raise KeyError(f"thread {thread}")
            pool.barrier(thread)  # whoever waits for the culprit must get away

        with pytest.raises(KeyError, match=f"thread {culprit}"):
            pool.run(fail)
        pool.run(pool.barrier)  # and the pool is as good as new


def test_a_launch_within_a_launch_is_refused() -> None:
    pool = _native.ThreadPool(2)
    with pytest.raises(RuntimeError, match="one launch at a time"):
        pool.run(lambda thread: pool.run(lambda inner: None))


def test_denormals_count_as_zero_inside_and_not_outside() -> None:
    pool = _native.ThreadPool(2)
    products: list[float] = []
    tiny, half = np.float32(1e-38), np.float32(0.5)
    pool.run(lambda thread: products.append(float(tiny * half)))
    if os.uname().machine == "x86_64":
        assert products == [0.0, 0.0]
    assert float(tiny * half) > 0


def test_an_idle_pool_uses_no_cpu() -> None:
    pool = _native.ThreadPool(4)
    pool.launch_time(100)
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.05


def test_a_launch_takes_time_but_not_much() -> None:
    assert 0 < _native.ThreadPool(2).launch_time(1000) < 0.01


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_number_of_threads_out_of_range_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads={threads}"):
        _native.ThreadPool(threads)


@pytest.fixture
def no_setting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("QUIRE_THREADS", raising=False)
    return monkeypatch


def cgroup(root: Path, membership: str, files: dict[str, str]) -> str:
    """A file system with just /proc/self/cgroup and the cgroup files named."""
    for name, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}),
        ("0::/\n", {"cpu.max": "99999 100000\n"}),
        ("0::/not/mounted/here\n", {"cpu.max": "10000 100000\n"}),
        ("0::/a\n", {"unified/a/cpu.max": "10000 100000\n"}),
        (
            "3:cpu,cpuacct:/x\n1:memory:/\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "70000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
        ),
        ("3:cpuacct,cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}),
        ("3:cpu:/gone\n", {"cpu/cpu.cfs_quota_us": "20000", "cpu/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_cgroup_quota_limits_the_threads(
    no_setting: pytest.MonkeyPatch, tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    assert _native.default_threads(cgroup(tmp_path, membership, files)) == 1


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("", {}),
        ("0::/\n", {"cpu.max": "max 100000\n"}),
        ("0::/a\n", {"a/cpu.max": "99900000 100000\n"}),
        ("3:cpuset:/x\n", {"cpuset/x/cpu.cfs_quota_us": "1", "cpuset/x/cpu.cfs_period_us": "1"}),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}),
    ],
)
def test_without_a_quota_the_affinity_mask_counts(
    no_setting: pytest.MonkeyPatch, tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    assert _native.default_threads(cgroup(tmp_path, membership, files)) == len(os.sched_getaffinity(0))


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_THREADS", "7")
    assert _native.default_threads() == 7


@pytest.mark.parametrize("setting", ["", "0", "-3", "two", "2.5", "4 ", "99999999999"])
def test_a_bad_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("QUIRE_THREADS", setting)
    with pytest.raises(ValueError, match=f"QUIRE_THREADS='{setting}'.*1 to 1024"):
        _native.default_threads()
