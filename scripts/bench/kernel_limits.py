"""Limits of any kernel on this host, measured with kernels that are emitted and run like those of models.

They are the read bandwidth of memory and of the last-level cache, the peak of each multiply-add unit, and the cost of a
launch.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels._native import Plan
from quire.kernels.devices.cpu import Cpu
from quire.kernels.devices.instruction_sets import InstructionSet
from quire.kernels.emit.builder import BF16, F32, I8, I16, I32, I64, TILE, VI32, Builder, Value, vector
from quire.kernels.emit.dots import add_dots, is_neon
from quire.kernels.emit.products import NEAR_BYTES

LEAST_STREAM_BYTES = 256 << 20
LINE, STREAM_LINES, STREAM_ITEM_BYTES = 64, 8, 1 << 16
PIECES = 8
"""Pieces of the streamed memory, each a launch and a sample: a piece takes about as long as a kernel."""
ITERATIONS = 4096
"""Iterations of the innermost loop of a peak kernel's work item."""
ITEMS_PER_THREAD = 32


@dataclass(frozen=True)
class Unit:
    """A multiply-add unit.

    `emit` emits its kernel, `lanes` are the 32-bit lanes of a vector, `chains` the independent instructions of an
    iteration, and `operations` those of one instruction (a multiply-add is two).
    """

    name: str
    emit: Callable[[Builder, Value, int, int], None]
    lanes: int
    chains: int
    operations: int


def _fma(b: Builder, data: Value, lanes: int, chains: int) -> None:
    x, y = (b.load(data, i * LINE, vector(F32, lanes), LINE) for i in range(2))
    starts = [b.load(data, (2 + i) * LINE, x.type, LINE) for i in range(chains)]
    with b.loop(0, ITERATIONS, state=starts) as loop:
        loop.carry(*(b.fma(x, y, acc) for acc in loop.state))
    _keep(b, data, loop.results)


def _vnni(b: Builder, data: Value, lanes: int, chains: int) -> None:
    x, y = (b.load(data, i * LINE, vector(I8, 4 * lanes), LINE) for i in range(2))
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    starts = [b.load(data, (2 + i) * LINE, vector(I32, lanes), LINE) for i in range(chains)]
    with b.loop(0, ITERATIONS, state=starts) as loop:
        loop.carry(*(b.call(name, [acc, x, y], acc.type) for acc in loop.state))
    _keep(b, data, loop.results)


def _neon(isa: str, b: Builder, data: Value, lanes: int, chains: int) -> None:
    """Emit dot products of bytes; a chain is an operand too, so that products are not hoisted."""
    x = b.load(data, 0, vector(I32, lanes), LINE)
    starts = [b.load(data, (2 + i) * LINE, x.type, LINE) for i in range(chains)]
    with b.loop(0, ITERATIONS, state=starts) as loop:
        loop.carry(*(add_dots(b, isa, acc, acc, x) for acc in loop.state))
    _keep(b, data, loop.results)


def _words(b: Builder, data: Value, lanes: int, chains: int) -> None:
    _multiply_adds(b, data, lanes, chains, I16, "avx512.pmaddw.d.512" if lanes == 16 else "avx2.pmadd.wd")


def _bytes(b: Builder, data: Value, lanes: int, chains: int) -> None:
    _multiply_adds(b, data, lanes, chains, I8, "avx512.pmaddubs.w.512" if lanes == 16 else "avx2.pmadd.ub.sw")


def _multiply_adds(b: Builder, data: Value, lanes: int, chains: int, element: str, name: str) -> None:
    """Emit products of pairs, each added to its chain; a chain is an operand too, so that products are not hoisted."""
    sums = {I8: I16, I16: I32}[element]
    x = b.lanes_as(b.load(data, 0, vector(I32, lanes), LINE), element)
    starts = [b.lanes_as(b.load(data, (2 + i) * LINE, vector(I32, lanes), LINE), sums) for i in range(chains)]
    with b.loop(0, ITERATIONS, state=starts) as loop:
        loop.carry(*(
            acc + b.call(f"llvm.x86.{name}", [b.lanes_as(acc, element), x], acc.type) for acc in loop.state
        ))  # fmt: skip
    _keep(b, data, loop.results)


def _pairs(b: Builder, data: Value, lanes: int, chains: int) -> None:
    x, y = (b.load(data, i * LINE, vector(BF16, 2 * lanes), LINE) for i in range(2))
    starts = [b.load(data, (2 + i) * LINE, vector(F32, lanes), LINE) for i in range(chains)]
    with b.loop(0, ITERATIONS, state=starts) as loop:
        loop.carry(*(b.call("llvm.x86.avx512bf16.dpbf16ps.512", [acc, x, y], acc.type) for acc in loop.state))
    _keep(b, data, loop.results)


def _keep(b: Builder, data: Value, results: list[Value]) -> None:
    """Store the sum of the results, so that they are computed."""
    total = results[0]
    for result in results[1:]:
        total = total + result
    b.store(total, data, 1024, LINE)


def _tiles(b: Builder, data: Value, product: str) -> None:
    """Emit products of two by two tiles, as in a product of 32 rows by 32 columns."""
    rows, width, stride = b.constant(16, I16), b.constant(LINE, I16), b.constant(LINE, I64)
    left, right = (
        [b.call("llvm.x86.tileloadd64.internal", [rows, width, b.address(data, i * 1024), stride], TILE) for i in pair]
        for pair in ((0, 1), (2, 3))
    )
    zeros = [b.call("llvm.x86.tilezero.internal", [rows, width], TILE) for _ in range(4)]
    with b.loop(0, ITERATIONS, state=zeros) as loop:
        pairs = [(x, w) for x in left for w in right]
        loop.carry(*(
            b.call(f"llvm.x86.{product}.internal", [rows, width, width, total, x, w], TILE)
            for total, (x, w) in zip(loop.state, pairs, strict=True)
        ))  # fmt: skip
    for total in loop.results:
        b.call_void("llvm.x86.tilestored64.internal", [rows, width, b.address(data, 4096), stride, total])


def _amx_bf16(b: Builder, data: Value, lanes: int, chains: int) -> None:
    _tiles(b, data, "tdpbf16ps")


def _amx_int8(b: Builder, data: Value, lanes: int, chains: int) -> None:
    _tiles(b, data, "tdpbsud")


def units(isa: InstructionSet) -> list[Unit]:
    """Return the units of an instruction set, with enough chains to hide latency and few enough for the registers."""
    lanes, chains = {512: (16, 12), 256: (8, 10), 128: (4, 16)}[isa.vector_bits]
    found = [Unit("fma", _fma, lanes, chains, lanes * 2)]
    if is_neon(isa.name):
        name = "sdot" if "dotprod" in isa.needs else "smull"
        return [*found, Unit(name, functools.partial(_neon, isa.name), lanes, chains, lanes * 8)]
    if "vnni" in isa.features:
        found.append(Unit("vnni", _vnni, lanes, chains, lanes * 8))
    else:
        found.append(Unit("vpmaddwd", _words, lanes, 14, lanes * 4))
        found.append(Unit("vpmaddubsw", _bytes, lanes, 14, lanes * 8))
    if "avx512bf16" in isa.features:
        found.append(Unit("avx512-bf16", _pairs, lanes, chains, lanes * 4))
    if "amx-tile" in isa.needs:
        found.append(Unit("amx-bf16", _amx_bf16, 0, 4, 16 * 16 * 32 * 2))
        found.append(Unit("amx-int8", _amx_int8, 0, 4, 16 * 16 * 64 * 2))
    return found


def peak_name(unit: Unit) -> str:
    """Return the name of the unit's kernel."""
    return f"peak_{unit.name.replace('-', '_')}"


def peak_kernel(unit: Unit) -> str:
    """Return a kernel that only multiplies and adds, in registers. Buffers: 8 KB of data and results."""
    b = Builder(peak_name(unit))
    data = b.buffer(0)
    with b.items():
        unit.emit(b, data, unit.lanes, unit.chains)
    return b.text()


def stream_kernel() -> str:
    """Return a kernel that reads memory in order, 64 KB per work item. Buffers: the memory, and a line of results."""
    b = Builder("stream")
    source, out = b.buffer(0), b.buffer(1)
    zeros = [b.constant(0, VI32)] * 4
    with b.items() as item:
        base = b.address(source, item * STREAM_ITEM_BYTES)
        with b.loop(0, STREAM_ITEM_BYTES, STREAM_LINES * LINE, state=zeros) as part:
            totals = list(part.state)
            for line in range(STREAM_LINES):
                b.prefetch(base, part.index + (NEAR_BYTES + line * LINE), level=1)
                totals[line % 4] = totals[line % 4] + b.load(base, part.index + line * LINE, VI32, LINE)
            part.carry(*totals)
        _keep(b, out, part.results)
    return b.text()


def empty_kernel() -> str:
    """Return a kernel that does nothing."""
    return Builder("empty").text()


def last_level_cache_bytes() -> int:
    """Return the size of CPU 0's largest cache, or 32 MiB if it is unknown."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units_ = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units_[size[-1]] for size in sizes if size[-1:] in units_), default=32 << 20)


def memory_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return native memory as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class HostLimits:
    """Measures the limits, a few samples at a time, in memory of the kind that weights use."""

    def __init__(self, cpu: Cpu) -> None:
        self.cache_bytes = last_level_cache_bytes()
        self.samples: dict[str, list[float]] = {}
        self._cpu = cpu  # owns the code and the memory
        big = min(max(LEAST_STREAM_BYTES, 4 * self.cache_bytes), cpu.available_memory() // 4)
        self._source, self._source_bytes, self._data = cpu.native.allocate(big), big, cpu.native.allocate(8192)
        bits = np.random.default_rng(0).uniform(1.0, 2.0, 1 << 20).astype(np.float32).view(np.uint8)
        for address, size in ((self._source, big), (self._data, 8192)):
            memory_at(address, size)[:] = np.resize(bits, size)
        self._stream = cpu.compile_text(stream_kernel(), "stream")
        self._empty = cpu.compile_text(empty_kernel(), "empty")
        self._units = [(unit, cpu.compile_text(peak_kernel(unit), peak_name(unit))) for unit in units(cpu.isa)]

    def _seconds(self, kernel: int, launches: list[list[int]], items: int) -> list[float]:
        """Return the seconds of launches of a kernel over these buffers."""
        plan = Plan()
        for buffers in launches:
            plan.add(kernel, buffers, "tokens", repeats=items)
        return self._cpu.native.profile(plan, {"tokens": 1})

    def measure(self) -> None:
        """Sample every limit. Memory is read last, so that nothing of a model is left in the caches."""
        for unit, kernel in self._units:
            items = ITEMS_PER_THREAD * self._cpu.native.threads
            seconds = self._seconds(kernel, [[self._data]] * 2, items)[1:]
            self._add(unit.name, items * ITERATIONS * unit.chains * unit.operations, seconds)
        seconds = self._seconds(self._empty, [[]] * 101, 8 * self._cpu.native.threads)
        self.samples.setdefault("launch", []).append(statistics.median(seconds))
        size = self._source_bytes // PIECES // STREAM_ITEM_BYTES * STREAM_ITEM_BYTES
        pieces = [[self._source + i * size, self._data] for i in range(PIECES)]
        cached = min(size, self.cache_bytes // 4 // STREAM_ITEM_BYTES * STREAM_ITEM_BYTES)
        passes = self._seconds(self._stream, pieces[-1:] * 5, cached // STREAM_ITEM_BYTES)[1:]
        self._add("cache", cached, passes)
        self._add("memory", size, self._seconds(self._stream, pieces, size // STREAM_ITEM_BYTES))

    def _add(self, name: str, amount: int, seconds: list[float]) -> None:
        self.samples.setdefault(name, []).extend(amount / one for one in seconds)

    def values(self, best: bool = False) -> dict[str, float]:
        """Return the limits so far: medians, or the `best`, in bytes or operations per second; for `launch` seconds."""
        choose = max if best else statistics.median
        rates = {name: choose(samples) for name, samples in self.samples.items()}
        return rates | {"launch": min(self.samples["launch"])}
