"""The thread pool runs on every worker that arrives, survives exceptions, and sleeps when idle."""

from __future__ import annotations

import ctypes
import mmap
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
def test_every_thread_runs_once_a_launch_that_waits_for_it(size: int, pin: bool) -> None:
    pool = _native.ThreadPool(size, pin)
    assert (pool.size, pool.nodes) == (size, 1)
    threads: dict[int, set[int]] = {thread: set() for thread in range(size)}
    counts = [0] * size
    all_here = threading.Barrier(size)

    def count(thread: int) -> None:
        all_here.wait()
        threads[thread].add(threading.get_ident())
        counts[thread] += 1

    for _ in range(200):
        pool.run(count)
    assert counts == [200] * size
    assert threads[0] == {threading.get_ident()}
    assert all(len(idents) == 1 for idents in threads.values())
    assert len(set.union(*threads.values())) == size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_caller_is_in_every_launch_and_no_thread_twice(size: int) -> None:
    pool = _native.ThreadPool(size)
    arrived: list[int] = []
    for _ in range(500):
        arrived.clear()
        pool.run(arrived.append)
        assert 0 in arrived
        assert len(set(arrived)) == len(arrived)
    counts = [0] * size
    all_here = threading.Barrier(size)

    def count(thread: int) -> None:
        all_here.wait()
        counts[thread] += 1

    pool.run(count)  # workers that missed launches are back
    assert counts == [1] * size


def test_pinning_binds_the_workers_but_not_the_caller() -> None:
    before = os.sched_getaffinity(0)
    pool = _native.ThreadPool(min(4, len(before)), pin=True)
    masks: dict[int, set[int]] = {}
    all_here = threading.Barrier(pool.size)

    def read_affinity(thread: int) -> None:
        all_here.wait()
        masks[thread] = os.sched_getaffinity(0)

    pool.run(read_affinity)
    assert pool.pinned
    assert masks.pop(0) == before
    assert all(len(mask) == 1 for mask in masks.values())
    assert len(set().union(*masks.values())) == pool.size - 1
    assert os.sched_getaffinity(0) == before


def test_more_threads_than_cpus_are_not_pinned() -> None:
    pool = _native.ThreadPool(len(os.sched_getaffinity(0)) + 1, pin=True)
    assert not pool.pinned
    pool.run(lambda thread: None)


@pytest.mark.parametrize("size", SIZES)
def test_an_exception_of_any_thread_reaches_the_caller(size: int) -> None:
    pool = _native.ThreadPool(size)
    all_here = threading.Barrier(size)
    for failing in range(size):

        def fail(thread: int, failing: int = failing) -> None:
            all_here.wait()
            if thread == failing:
                raise KeyError(f"thread {thread}")

        with pytest.raises(KeyError, match=f"thread {failing}"):
            pool.run(fail)
        pool.run(lambda thread: all_here.wait() and None)  # the pool is still usable


def test_a_nested_launch_is_rejected() -> None:
    pool = _native.ThreadPool(2)
    with pytest.raises(RuntimeError, match="one launch at a time"):
        pool.run(lambda thread: pool.run(lambda inner: None))


def test_denormals_are_flushed_only_inside_a_launch() -> None:
    pool = _native.ThreadPool(2)
    products: list[float] = []
    tiny, half = np.float32(1e-38), np.float32(0.5)
    all_here = threading.Barrier(2)

    def multiply(_thread: int) -> None:
        all_here.wait()
        products.append(float(tiny * half))

    pool.run(multiply)
    assert products == [0.0, 0.0]
    assert float(tiny * half) > 0


def test_an_idle_pool_uses_no_cpu() -> None:
    pool = _native.ThreadPool(4)
    pool.launch_time(100)
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.05


def test_the_time_of_a_launch_is_measured() -> None:
    assert _native.ThreadPool(2).launch_time(100) > 0


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_number_of_threads_out_of_range_is_rejected(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads={threads}"):
        _native.ThreadPool(threads)


@pytest.mark.parametrize("nodes", [[1], [0, 2], [0, 1, 0], [0, -1]])
def test_nodes_out_of_order_are_rejected(nodes: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending order"):
        _native.ThreadPool(places=[_native.Place(node, []) for node in nodes])


# ---- plans --------------------------------------------------------------------------------------

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Recorder:
    """A plan of `launches` launches whose kernels record which thread computes which items, on a pool with threads on
    these nodes."""

    def __init__(self, nodes: list[int], launches: int) -> None:
        self.nodes = nodes
        self.chunks: list[tuple[int, int, range]] = []  # launch, thread, items, in the order of completion
        self.early: list[int] = []  # launches that began before the previous one was done
        self.done = [0] * launches
        self.tokens = 0
        self._pool = _native.ThreadPool(places=[_native.Place(node, []) for node in nodes])
        self._threads: dict[int, int] = {}
        all_here = threading.Barrier(self._pool.size)

        def meet(thread: int) -> None:
            self._threads[threading.get_ident()] = thread
            all_here.wait()

        self._pool.run(meet)
        self._device, self._plan = _native.CpuDevice(self._pool), _native.Plan()
        self._kernels = [KERNEL(lambda _b, _d, first, end, i=i: self._kernel(i, first, end)) for i in range(launches)]
        for kernel in self._kernels:
            address = ctypes.cast(kernel, ctypes.c_void_p).value
            assert address is not None
            self._plan.add(address, [], "tokens")
            self._plan.add(address, [], "logit_rows")  # without items

    def _kernel(self, launch: int, first: int, end: int) -> None:
        if launch > 0 and self.done[launch - 1] != self.tokens:
            self.early.append(launch)
        time.sleep(0)  # let other threads in
        self.chunks.append((launch, self._threads[threading.get_ident()], range(first, end)))
        self.done[launch] += end - first

    def run(self, tokens: int) -> None:
        self._begin(tokens)
        self._device.run(self._plan, {"tokens": tokens})

    def profile(self, tokens: int) -> list[float]:
        self._begin(tokens)
        return self._device.profile(self._plan, {"tokens": tokens})

    def _begin(self, tokens: int) -> None:
        self.tokens, self.chunks, self.done = tokens, [], [0] * len(self.done)


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 0, 0, 0], [0, 1], [0, 0, 1], [0, 1, 1, 2]])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 100])
def test_a_plan_computes_every_item_once_and_launches_in_order(nodes: list[int], tokens: int) -> None:
    recorder = Recorder(nodes, launches=5)
    for _ in range(5):
        recorder.run(tokens)
        for launch in range(5):
            items = [item for at, _, chunk in recorder.chunks if at == launch for item in chunk]
            assert sorted(items) == list(range(tokens))
        assert recorder.early == []


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 1, 1, 2]])
def test_a_profile_has_the_time_of_each_launch(nodes: list[int]) -> None:
    recorder = Recorder(nodes, launches=5)
    before = time.perf_counter()
    seconds = recorder.profile(20)
    assert sum(seconds) <= time.perf_counter() - before
    assert recorder.done == [20] * 5
    assert all(second > 0 for second in seconds[::2])
    assert seconds[1::2] == [0.0] * 5  # launches without items
    assert recorder.profile(0) == [0.0] * 10


@pytest.mark.parametrize(("nodes", "begins"), [([0, 1], [0, 50]), ([0, 0, 0, 1], [0, 75]), ([0, 1, 1, 2], [0, 25, 75])])
def test_threads_take_the_items_of_their_node_first(nodes: list[int], begins: list[int]) -> None:
    recorder = Recorder(nodes, launches=5)
    for _ in range(20):
        recorder.run(100)
        own: dict[tuple[int, int], list[bool]] = {}
        for launch, thread, items in recorder.chunks:
            node = sum(begin <= items[0] for begin in begins) - 1
            assert items[-1] < [*begins, 100][node + 1]  # no chunk spans two nodes
            own.setdefault((launch, thread), []).append(node == nodes[thread])
        assert all(order == sorted(order, reverse=True) for order in own.values())


def test_touching_by_node_makes_memory_resident_and_keeps_its_contents() -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    size = 32 << 20
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)  # not from a heap that has pages already
    memory[12345] = 7
    before = resident_pages()
    _native.ThreadPool(places=[_native.Place(node, []) for node in (0, 1, 1)]).touch(memory)
    assert (resident_pages() - before) * os.sysconf("SC_PAGE_SIZE") > size * 0.9
    assert memory[12345] == 7
    assert memory.sum() == 7
