"""Read bandwidth of this machine's memory, the bound of every decode step."""

from __future__ import annotations

import ctypes
import mmap
import time

import numpy as np
from bench.kernel_limits import LINE, STREAM_ITEM_BYTES, stream_kernel

from quire.kernels._native import ThreadPool
from quire.kernels.devices.cpu import Cpu
from quire.kernels.devices.instruction_sets import choose_isa
from quire.kernels.host import cache_folder

SIZE = 1 << 30  # bytes; far larger than the caches
PASSES = 5
RESULTS = 4096  # bytes for the results of a thread

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Bandwidth:
    """Threads that read a gibibyte of memory on huge pages, each a share of it, in a compiled loop."""

    def __init__(self, threads: int) -> None:
        self._cpu = Cpu(choose_isa(), cache_folder())  # owns the code
        self._kernel = _KERNEL(self._cpu.compile_text(stream_kernel(), "stream"))
        self._pool = ThreadPool(threads)
        self._memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(self._memory, np.uint8)
        data.fill(1)
        self._results = np.zeros((threads + 1) * RESULTS, np.uint8)
        begin = self._results.ctypes.data + -self._results.ctypes.data % LINE
        self._arguments = [
            (ctypes.c_void_p * 2)(data.ctypes.data, begin + thread * RESULTS) for thread in range(threads)
        ]

    def measure(self) -> float:
        """Return bytes per second, the best of several passes."""
        return SIZE / min(self._pass_seconds() for _ in range(PASSES))

    def _pass_seconds(self) -> float:
        begun = time.perf_counter()
        self._pool.run(self._read)
        return time.perf_counter() - begun

    def _read(self, thread: int) -> None:
        chunks = SIZE // STREAM_ITEM_BYTES
        begin, end = (chunks * number // self._pool.size for number in (thread, thread + 1))
        self._kernel(ctypes.addressof(self._arguments[thread]), None, begin, end)
