"""A builder for GPUs: the 16 lanes of a vector are 16 threads of half a warp, which compute a work item together.

Emitters do not see it. A vector of 16 lanes is a scalar of each thread, and one of 64 lanes four, those of a thread 16
apart; one of fewer lanes is repeated until there are 16. Scalars are the same in all threads, and one of them stores
them. Loads and stores of vectors are of neighbouring addresses in neighbouring threads. Lanes are exchanged by
shuffles, so reductions keep their order, and every result its bits. Scratch is shared memory.

Threads may run ahead of each other, so a thread that reads what another one has written, or writes what another one may
still be reading, must wait: before such an access all threads of the item meet. Accesses are told apart by the buffer
or the scratch that they go to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from quire.kernels.emit.builder import (
    BF16,
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    PTR,
    Loop,
    Value,
    element_of,
    lanes_of,
    vector,
)
from quire.kernels.emit.cuda.lanes import LaneBuilder, parts_of
from quire.kernels.emit.cuda.threads import (
    KERNEL,
    SHARED_BYTES,
    WARP,
    GpuKernel,
    LaunchShape,
    entry,
    register,
)

BLOCK_ITEMS = 8
"""Most work items of a block of threads."""

_SHARED = "{addr_space = 3 : i32, alignment = 64 : i64}"

_SIZES = {I1: 1, I8: 1, I16: 2, BF16: 2, F16: 2, I32: 4, F32: 4, I64: 8}

_CLEAN, _READ, _WRITTEN, _UNKNOWN = range(4)
_OTHER = "other"
"""Memory whose buffer is not known."""


class ScratchError(Exception):
    """The shared memory of a block can't hold the scratch of one work item."""


class WarpBuilder(LaneBuilder):
    """Collects the text of a kernel that half a warp runs for each work item."""

    def __init__(self) -> None:
        super().__init__(KERNEL)
        self._scratch: list[tuple[str, int]] = []
        self._scratch_bytes = 0
        self._roots: dict[str, str] = {}  # what a pointer leads to
        self._access: dict[str, int] = {}  # since all threads of the item last met
        self._otherwise = _CLEAN
        self._read: set[str] = set()
        self._written: dict[str, set[int]] = {}  # by how many lanes
        self._before_reads: dict[int, str] = {}  # meetings that are needed only if the memory is ever written,
        self._before_writes: dict[int, str] = {}  # or only if it is read or other lanes write it too
        self._by_thread = False  # each thread has its own iteration of a loop

    # The whole kernel

    def kernel(self, shared_bytes: int = SHARED_BYTES) -> GpuKernel:
        """Return the kernel. Raises ScratchError if an item has more scratch than `shared_bytes`."""
        each = self._item_bytes
        if each > shared_bytes:
            raise ScratchError(f"{each} bytes")
        shape, memory = self._shape(max(SHARED_BYTES // each, 1) if self._scratch else BLOCK_ITEMS), ""
        setup = [
            f"%thread = {register('tid.x')}",
            "%fifteen = arith.constant 15 : i32",
            f"%sixteen = arith.constant {WARP - LANES} : i32",
            "%all = arith.constant 65535 : i32",
            "%lane = arith.andi %thread, %fifteen : i32",
            "%upper = arith.andi %thread, %sixteen : i32",
            "%mates = arith.shli %all, %upper : i32",
        ]
        if self._scratch:
            size, linkage = max(shape.threads_per_block // shape.threads_per_item, 1) * each, "internal"
            if size > SHARED_BYTES:  # which no kernel can declare
                shape, size, linkage = replace(shape, shared_bytes=size), 0, "external"
            memory = f"llvm.mlir.global {linkage} @scratch() {_SHARED} : !llvm.array<{size} x i8>\n"
            setup += [
                "%shared = llvm.mlir.addressof @scratch : !llvm.ptr<3>",
                f"%mine_of = arith.constant {shape.threads_per_item} : i32",
                f"%each = arith.constant {each} : i32",
                "%place = arith.divui %thread, %mine_of : i32",
                "%before = arith.muli %place, %each : i32",
                "%mine = llvm.getelementptr %shared[%before] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8",
                f"%base = llvm.addrspacecast %mine : !llvm.ptr<3> to {PTR}",
                *(f"{name} = llvm.getelementptr %base[{at}] : ({PTR}) -> {PTR}, i8" for name, at in self._scratch),
            ]
        unneeded = {i for i, root in self._before_reads.items() if root not in self._written}
        shared = self._read | {root for root, lanes in self._written.items() if len(lanes) > 1}
        unneeded |= {i for i, root in self._before_writes.items() if root not in shared}
        self._lines = [line for i, line in enumerate(self._lines) if i not in unneeded]
        self._entry = [*setup, *self._entry]
        return GpuKernel(memory + self.text() + entry(shape), shape)

    @property
    def _item_bytes(self) -> int:
        """Bytes from one item's scratch to the next one's: items use different banks."""
        return self._scratch_bytes + (64 - self._scratch_bytes) % 128

    def _shape(self, items: int) -> LaunchShape:
        """Return how the kernel is launched if the scratch of so many items fits a block."""
        return LaunchShape(LANES, LANES * min(BLOCK_ITEMS, items))

    # Memory

    def buffer(self, number: Value | int) -> Value:
        """See Builder. What is written to a buffer that a Value names must not be read by another name."""
        value = super().buffer(number)
        self._roots[value.name] = f"buffer {number.name if isinstance(number, Value) else number}"
        return value

    def address(self, base: Value, offset: Value | int) -> Value:
        """See Builder."""
        value = super().address(base, offset)
        self._roots[value.name] = self._root(base)
        return value

    def load(self, base: Value, offset: Value | int, type_: str, alignment: int | None = None) -> Value:
        """See Builder."""
        root = self._root(base)
        if root not in ("%buffers", "%dims"):  # which no kernel writes
            self._before_read(root)
        if not type_.startswith("vector"):
            return super().load(base, offset, type_, alignment)
        if self._by_thread:
            raise NotImplementedError("a vector where each thread has its own iteration")
        at, element = self._lane_address(base, offset, type_), element_of(type_)
        parts = [
            super(WarpBuilder, self).load(at, i * LANES * _SIZES[element], element) for i in range(parts_of(type_))
        ]
        return self._of_parts(parts, type_)

    def store(self, value: Value, base: Value, offset: Value | int, alignment: int | None = None) -> None:
        """See Builder."""
        lanes = lanes_of(value.type) if value.type.startswith("vector") else 1
        if self._by_thread:
            if value.type.startswith("vector"):
                raise NotImplementedError("a vector where each thread has its own iteration")
            self._written.setdefault(self._root(base), set()).add(0)
            super().store(value, base, offset)
            return
        self._before_write(self._root(base), min(lanes, LANES))
        if not value.type.startswith("vector"):
            value = Value(self, value.name, vector(value.type, 1))
        at, size = self._lane_address(base, offset, value.type), _SIZES.get(element_of(value.type), 8)
        if lanes < LANES:
            self.emit(f"scf.if {self._is_in([lane < lanes for lane in range(LANES)]).name} {{")
        for i in range(parts_of(value.type)):
            super().store(self._part(value, i), at, i * LANES * size)
        if lanes < LANES:
            self.emit("}")

    def _lane_address(self, base: Value, offset: Value | int, type_: str) -> Value:
        """Return the address of the thread's lane of a vector at `base` plus `offset` bytes."""
        lanes, at = lanes_of(type_), self.address(base, offset)
        if lanes == 1:
            return at
        size = self.constant(_SIZES[element_of(type_)], I32)
        within = self._hoist(
            ("bytes", min(lanes, LANES), size.name),
            I32,
            f"arith.muli {self._lane_below(lanes).name}, {size.name} : i32",
        )
        return self.address(at, self._hoist(("bytes", within.name), I64, f"arith.extui {within.name} : i32 to i64"))

    def prefetch(self, base: Value, offset: Value | int, level: int) -> None:
        """Do nothing: other warps compute while one waits for memory."""

    def scratch(self, size: int) -> Value:
        """See Builder; of shared memory."""
        name = self._name()
        self._scratch.append((name, self._scratch_bytes))
        self._scratch_bytes += -(-size // 64) * 64
        self._roots[name] = name
        return Value(self, name, PTR)

    # Meetings of threads

    def _root(self, pointer: Value) -> str:
        return pointer.name if pointer.name in ("%buffers", "%dims") else self._roots.get(pointer.name, _OTHER)

    def _meet(self) -> None:
        self.emit('llvm.call_intrinsic "llvm.nvvm.bar.warp.sync"(%mates) : (i32) -> ()')

    def _all_met(self) -> None:
        self._access, self._otherwise = {}, _CLEAN

    def _before_read(self, root: str) -> None:
        self._read.add(root)
        if self._by_thread:
            return
        state = self._access.get(root, self._otherwise)
        if state == _WRITTEN:
            self._meet()
            self._all_met()
        elif state == _UNKNOWN:
            self._before_reads[len(self._lines)] = root
            self._meet()
        self._access[root] = _READ

    def _before_write(self, root: str, lanes: int) -> None:
        state = self._access.get(root, self._otherwise)
        if state == _READ:
            self._meet()
            self._all_met()
        elif state != _CLEAN:
            self._before_writes[len(self._lines)] = root
            self._meet()
        self._access[root] = _WRITTEN
        self._written.setdefault(root, set()).add(lanes)

    def _forget(self) -> None:
        """Note that any access may have come before."""
        self._access, self._otherwise = {}, _UNKNOWN

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1, state: Sequence[Value] = ()) -> Iterator[Loop]:
        """See Builder."""
        self._forget()
        with super().loop(start, stop, step, state) as loop:
            yield loop
        self._forget()

    @contextmanager
    def each_scalar(self, start: Value | int, stop: Value | int) -> Iterator[Loop]:
        """See Builder. Each thread does some of the iterations."""
        lane = self._hoist("lane number", I64, "arith.extui %lane : i32 to i64")
        self._meet()
        self._all_met()
        with self._threads_apart(), self.loop(lane + start, stop, LANES) as loop:
            yield loop

    @contextmanager
    def _threads_apart(self) -> Iterator[None]:
        self._by_thread = True
        yield
        self._by_thread = False

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """See Builder."""
        with super().when(condition):
            yield
        self._forget()
