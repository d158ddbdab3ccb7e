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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
    Builder,
    Loop,
    Value,
    element_of,
    lanes_of,
    vector,
    with_element,
)
from quire.kernels.emit.cuda.threads import KERNEL, SHARED_BYTES, WARP, GpuKernel, LaunchShape, entry, register

BLOCK_ITEMS = 8
"""Most work items of a block of threads."""

_SIZES = {I1: 1, I8: 1, I16: 2, BF16: 2, F16: 2, I32: 4, F32: 4, I64: 8}
_SEGMENT = 0x101F  # shuffles stay within 16 threads

_CLEAN, _READ, _WRITTEN, _UNKNOWN = range(4)
_OTHER = "other"
"""Memory whose buffer is not known."""


class ScratchError(Exception):
    """The shared memory of a block can't hold the scratch of one work item."""


class WarpBuilder(Builder):
    """Collects the text of a kernel that half a warp runs for each work item."""

    def __init__(self) -> None:
        super().__init__(KERNEL)
        self._scratch: list[tuple[str, int]] = []
        self._scratch_bytes = 0
        self._hoisted: dict[object, Value] = {}
        self._roots: dict[str, str] = {}  # what a pointer leads to
        self._access: dict[str, int] = {}  # since all threads of the item last met
        self._otherwise = _CLEAN
        self._read: set[str] = set()
        self._written: dict[str, set[int]] = {}  # by how many lanes
        self._before_reads: dict[int, str] = {}  # meetings that are needed only if the memory is ever written,
        self._before_writes: dict[int, str] = {}  # or only if it is read or other lanes write it too
        self._by_thread = False  # each thread has its own iteration of a loop

    # The whole kernel

    def kernel(self) -> GpuKernel:
        """Return the kernel. Raises ScratchError."""
        each = self._scratch_bytes + (64 - self._scratch_bytes) % 128  # items use different banks
        if each > SHARED_BYTES:
            raise ScratchError(f"{each} bytes")
        shape, memory = self._shape(SHARED_BYTES // each if self._scratch else BLOCK_ITEMS), ""
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
            memory = (
                "llvm.mlir.global internal @scratch() {addr_space = 3 : i32, alignment = 64 : i64} : "
                f"!llvm.array<{shape.threads_per_block // shape.threads_per_item * each} x i8>\n"
            )
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

    def _shape(self, items: int) -> LaunchShape:
        """Return how the kernel is launched if the scratch of so many items fits a block."""
        return LaunchShape(LANES, LANES * min(BLOCK_ITEMS, items))

    def mlir_type(self, type_: str) -> str:
        """See Builder: what a thread has of a value."""
        if not type_.startswith("vector"):
            return type_
        parts = _parts_of(type_)
        return element_of(type_) if parts == 1 else vector(element_of(type_), parts)

    # Lanes

    def _hoist(self, key: object, type_: str, operation: str) -> Value:
        """Return the result of an operation at the kernel's start, which is emitted once."""
        if key not in self._hoisted:
            value = Value(self, f"%h{len(self._hoisted)}", type_)
            self._entry.append(f"{value.name} = {operation}")
            self._hoisted[key] = value
        return self._hoisted[key]

    @property
    def _lane(self) -> Value:
        return Value(self, "%lane", I32)

    def _lane_below(self, lanes: int) -> Value:
        """Return the number of the thread's lane in a vector of so many, which is repeated."""
        if lanes >= LANES:
            return self._lane
        mask = self.constant(lanes - 1, I32)
        return self._hoist(("lane", lanes), I32, f"arith.andi %lane, {mask.name} : i32")

    def _part(self, value: Value, number: int) -> Value:
        """Return lanes 16 i .. 16 i + 15 of a vector as a scalar of each thread."""
        element = element_of(value.type)
        if _parts_of(value.type) == 1:
            return Value(self, value.name, element)
        return self._result(
            element, f"vector.extract {value.name}[{number}] : {element} from {self.mlir_type(value.type)}"
        )

    def _of_parts(self, parts: Sequence[Value], type_: str) -> Value:
        """Return a vector of scalars of each thread."""
        if len(parts) == 1:
            return Value(self, parts[0].name, type_)
        mlir_type, name = self.mlir_type(type_), self.constant(0, type_).name
        for i, part in enumerate(parts):
            name = self._result(type_, f"vector.insert {part.name}, {name} [{i}] : {part.type} into {mlir_type}").name
        return Value(self, name, type_)

    def _nibbles(self, table: Sequence[int]) -> Value:
        """Return the thread's entry of a table of 16 numbers below 16."""
        word = sum(entry << 4 * i for i, entry in enumerate(table))
        packed = self.constant(word - (1 << 64) if word >> 63 else word, I64)
        four, fifteen = self.constant(4, I32), self.constant(15, I64)
        shift = self._hoist("shift", I32, f"arith.muli %lane, {four.name} : i32")
        wide = self._hoist("wide shift", I64, f"arith.extui {shift.name} : i32 to i64")
        key = tuple(table)
        moved = self._hoist((key, 0), I64, f"arith.shrui {packed.name}, {wide.name} : i64")
        low = self._hoist((key, 1), I64, f"arith.andi {moved.name}, {fifteen.name} : i64")
        return self._hoist((key, 2), I32, f"arith.trunci {low.name} : i64 to i32")

    def _is_in(self, lanes: Sequence[bool]) -> Value:
        """Return an i1 that is true in some of the threads."""
        bits = self.constant(sum(1 << i for i, there in enumerate(lanes) if there), I32)
        zero, one, key = self.constant(0, I32), self.constant(1, I32), ("in", *lanes)
        moved = self._hoist((key, 0), I32, f"arith.shrui {bits.name}, %lane : i32")
        bit = self._hoist((key, 1), I32, f"arith.andi {moved.name}, {one.name} : i32")
        return self._hoist((key, 2), I1, f"arith.cmpi ne, {bit.name}, {zero.name} : i32")

    def _exchange(self, kind: str, value: Value, operand: Value) -> Value:
        """Return a scalar of another thread of the item: `idx`, of lane number `operand`; `bfly`, of the own number xor
        `operand`."""
        word, narrow = value, value.type
        if narrow in (F16, BF16):
            word = self.convert("arith.bitcast", word, I16)
        if narrow == F32:
            word = self.convert("arith.bitcast", word, I32)
        elif narrow != I32:
            word = self.convert("arith.extui", word, I32)
        mates, segment = Value(self, "%mates", I32), self.constant(_SEGMENT, I32)
        word = self.call(f"llvm.nvvm.shfl.sync.{kind}.i32", [mates, word, operand, segment], I32)
        if narrow == F32:
            return self.convert("arith.bitcast", word, F32)
        if narrow in (F16, BF16):
            return self.convert("arith.bitcast", self.convert("arith.trunci", word, I16), narrow)
        return self.convert("arith.trunci", word, narrow)

    def table(self, values: Sequence[int], element: str) -> Value:
        """See Builder."""
        type_ = vector(element, len(values))
        parts = []
        for first in range(0, max(len(values), LANES), LANES):
            some = [values[(first + i) % len(values)] for i in range(LANES)]
            result = self.constant(some[0], element)
            for i in range(1, LANES):
                here = self._is_in([lane == i for lane in range(LANES)])
                result = self.select(here, self.constant(some[i], element), result)
            parts.append(result)
        return self._of_parts(parts, type_)

    def broadcast(self, value: Value, lanes: int = LANES) -> Value:
        """See Builder."""
        type_ = vector(value.type, lanes)
        if _parts_of(type_) == 1:
            return Value(self, value.name, type_)
        return self._result(type_, f"vector.broadcast {value.name} : {value.type} to {self.mlir_type(type_)}")

    def lane_numbers(self, lanes: int = LANES) -> Value:
        """See Builder."""
        parts = [self._lane_below(lanes) + first for first in range(0, lanes, LANES)]
        return self._of_parts(parts, vector(I32, lanes))

    def fold_lanes(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """See Builder. The two halves have their places in every thread, as operands of `combine` may not commute."""
        width = lanes_of(value.type)
        while width > LANES:
            width //= 2
            value = combine(self._slice(value, 0, width), self._slice(value, width, width))
        while width > 1:
            width //= 2
            own = self._part(value, 0)
            other = self._exchange("bfly", own, self.constant(width, I32))
            is_high = self._is_in([bool(lane & width) for lane in range(LANES)])
            halves = self.select(is_high, other, own), self.select(is_high, own, other)
            value = combine(*(Value(self, half.name, vector(half.type, width)) for half in halves))
        return self.lane(value, 0)

    def lane(self, value: Value, number: int) -> Value:
        """See Builder."""
        part = self._part(value, number // LANES)
        if lanes_of(value.type) == 1:
            return part
        return self._exchange("idx", part, self.constant(number % LANES, I32))

    def with_lane(self, value: Value, number: int, lane: Value) -> Value:
        """See Builder."""
        lanes = lanes_of(value.type)
        parts = [self._part(value, i) for i in range(_parts_of(value.type))]
        here = self._is_in([i % lanes == number % LANES for i in range(LANES)])
        parts[number // LANES] = self.select(here, lane, parts[number // LANES])
        return self._of_parts(parts, value.type)

    def by_lane(self, operation: Callable[..., Value], *values: Value) -> Value:
        """See Builder."""
        type_ = values[-1].type
        results = [operation(*(self._part(value, i) for value in values)) for i in range(_parts_of(type_))]
        return self._of_parts(results, type_)

    def shuffle(self, low: Value, high: Value, order: Sequence[int]) -> Value:
        """See Builder."""
        lanes, type_ = lanes_of(low.type), vector(element_of(low.type), len(order))
        parts = []
        for first in range(0, max(len(order), LANES), LANES):
            numbers = [order[(first + i) % len(order)] for i in range(LANES)]
            sources = [(high if n >= lanes else low, n % lanes) for n in numbers]
            parts.append(self._gathered(sources))
        return self._of_parts(parts, type_)

    def _gathered(self, sources: Sequence[tuple[Value, int]]) -> Value:
        """Return the scalar whose value in thread i is lane number `sources[i][1]` of a vector."""
        places = [(value.name, number // LANES) for value, number in sources]
        result: Value | None = None
        for place in dict.fromkeys(places):
            wanted = [place == each for each in places]
            value = next(value for (value, _), there in zip(sources, wanted, strict=True) if there)
            lanes = min(lanes_of(value.type), LANES)
            part = self._part(value, place[1])
            table = [
                number % LANES if there else i
                for i, ((_, number), there) in enumerate(zip(sources, wanted, strict=True))
            ]
            if any(number % lanes != i % lanes for i, number in enumerate(table)):
                part = self._exchange("idx", part, self._nibbles(table))
            result = part if result is None else self.select(self._is_in(wanted), part, result)
        assert result is not None
        return result

    def lanes_as(self, value: Value, element: str) -> Value:
        """See Builder; to narrower lanes only."""
        source = element_of(value.type)
        bits, count = int(element[1:]), lanes_of(value.type) * 32 // int(element[1:])
        if source != I32 or bits >= 32 or count < LANES:
            raise NotImplementedError(f"lanes of {value.type} as {element}")
        lanes = self.shuffle(value, value, [i * bits // 32 for i in range(count)])
        shifts = self._of_parts([self._lane_below(32 // bits) * bits] * (count // LANES), lanes.type)
        return self.convert("arith.trunci", lanes >> shifts, with_element(lanes.type, element))

    def _slice(self, value: Value, start: int, width: int) -> Value:
        return self.shuffle(value, value, range(start, start + width))

    # Memory

    def buffer(self, number: int) -> Value:
        """See Builder."""
        value = super().buffer(number)
        self._roots[value.name] = f"buffer {number}"
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
            super(WarpBuilder, self).load(at, i * LANES * _SIZES[element], element) for i in range(_parts_of(type_))
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
        for i in range(_parts_of(value.type)):
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


def _parts_of(type_: str) -> int:
    """Return the number of scalars of a thread that make a vector."""
    return max(lanes_of(type_) // LANES, 1)
