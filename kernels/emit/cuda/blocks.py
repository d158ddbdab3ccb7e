"""A builder for kernels whose work items are computed by a whole block of threads.

What it inherits is done by every half-warp of the block: `team` is its number, and vectors have their lanes in its
threads. Beyond that, each thread may have addresses and values of its own, and all wait for each other at barriers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.kernels.emit.builder import F32, I32, I64, LANES, PTR, Builder, Loop, Value, vector
from quire.kernels.emit.cuda.threads import LaunchShape, register
from quire.kernels.emit.cuda.warps import WarpBuilder

_GLOBAL, _SHARED = "!llvm.ptr<1>", "!llvm.ptr<3>"

BLOCKS_AT_ONCE = 2
"""Blocks of a multiprocessor that compute while others wait for memory, or for the last of their threads."""


class RepeatedStoreError(Exception):
    """A kernel stores outside of `each`."""


class BlockBuilder(WarpBuilder):
    """Collects the text of a kernel that `parts` blocks of `threads` threads run for each work item."""

    def __init__(self, threads: int, parts: int = 1) -> None:
        super().__init__()
        self.threads = threads
        self._parts = parts
        self._stores = False
        self._in_turn: dict[int, Value] = {}

    def _shape(self, items: int) -> LaunchShape:
        """See WarpBuilder; a block computes one item, or a part of it."""
        return LaunchShape(self.threads * self._parts, self.threads, BLOCKS_AT_ONCE)

    @property
    def _item_bytes(self) -> int:
        """See WarpBuilder."""
        return self._scratch_bytes

    @property
    def thread(self) -> Value:
        """The number of the thread in its block, an i64."""
        return self._hoist("thread", I64, "arith.extui %thread : i32 to i64")

    @property
    def part(self) -> Value:
        """The number of the block among those of its item, an i64."""
        if self._parts == 1:
            return self.index(0)
        number = self._hoist("block", I32, register("ctaid.x"))
        wide = self._hoist("wide block", I64, f"arith.extui {number.name} : i32 to i64")
        return self._hoist("part", I64, f"arith.remui {wide.name}, {self.constant(self._parts, I64).name} : i64")

    @property
    def team(self) -> Value:
        """The number of the half-warp in its block, an i64."""
        return self._hoist("team", I64, f"arith.divui {self.thread.name}, {self.constant(LANES, I64).name} : i64")

    @property
    def teams(self) -> int:
        """The number of half-warps of a block."""
        return self.threads // LANES

    @contextmanager
    def each(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Loop]:
        """See Builder. Each half-warp does some of the iterations; all begin and end together."""
        self.barrier()
        with self.loop(self.team * step + start, stop, self.teams * step) as loop, self.by_team():
            yield loop
        self.barrier()

    @contextmanager
    def each_scalar(self, start: Value | int, stop: Value | int) -> Iterator[Loop]:
        """See Builder."""
        self.barrier()
        with self._threads_apart(), self.loop(self.thread + start, stop, self.threads) as loop:
            yield loop
        self.barrier()

    @contextmanager
    def once(self) -> Iterator[None]:
        """See Builder; done by one half-warp."""
        with self.each(0, 1):
            yield

    @contextmanager
    def by_team(self) -> Iterator[None]:
        """Allow stores, which several half-warps would else do at the same time."""
        before, self._stores = self._stores, True
        yield
        self._stores = before

    def store(self, value: Value, base: Value, offset: Value | int, alignment: int | None = None) -> None:
        """See Builder. Raises RepeatedStoreError where each half-warp would store the same."""
        if not self._stores and not self._by_thread:
            raise RepeatedStoreError
        super().store(value, base, offset, alignment)

    def own_scratch(self, size: int) -> Value:
        """See Builder."""
        size = -(-size // 64) * 64
        return self.address(self.scratch(size * self.teams), self.team * size)

    def in_turn(self, size: int) -> Value:
        """Return memory that what asks for it uses one after the other: between two of these all threads meet."""
        if size not in self._in_turn:
            self._in_turn[size] = self.scratch(size)
        return self._in_turn[size]

    def staged(self, base: Value, size: int, memory: Value | None = None) -> Value:
        """See Builder; a copy in shared memory, which is read in half the time or less."""
        copy = self.scratch(size) if memory is None else memory
        with self.each_scalar(0, size // 16) as part:
            self.store_own(self.load_own(base, part.index * 16, F32, 4), copy, part.index * 16)
        return copy

    def barrier(self) -> None:
        """Wait for all threads of the block."""
        self.call_void("llvm.nvvm.barrier.cta.sync.aligned.all", [self.constant(0, I32)])
        self._all_met()

    def load_own(
        self, base: Value, offset: Value | int, element: str, count: int, constant: bool = False
    ) -> list[Value]:
        """Load `count` neighbours at an address of the thread's own, aligned to their size; from memory that nobody
        writes meanwhile if `constant`."""
        at, how, pointer = self.address(base, offset), "", PTR
        if constant and self._root(base) not in dict(self._scratch):
            at, how, pointer = (
                self._result(_GLOBAL, f"llvm.addrspacecast {at.name} : {PTR} to {_GLOBAL}"),
                " invariant",
                _GLOBAL,
            )
        type_ = vector(element, count)
        loaded = self._result(
            type_, f"llvm.load {at.name}{how} {{alignment = {4 * count} : i64}} : {pointer} -> {type_}"
        )
        return [
            self._result(element, f"vector.extract {loaded.name}[{i}] : {element} from {type_}") for i in range(count)
        ]

    def copy_piece(self, source: Value, at: Value | int, target: Value, place: Value | int) -> None:
        """Begin to copy 16 bytes, aligned to their size, from memory that nobody writes to shared memory."""
        to, start = self.address(target, place), self.address(source, at)
        shared = self._result(_SHARED, f"llvm.addrspacecast {to.name} : {PTR} to {_SHARED}")
        outside = self._result(_GLOBAL, f"llvm.addrspacecast {start.name} : {PTR} to {_GLOBAL}")
        self.call_void("llvm.nvvm.cp.async.cg.shared.global.16", [shared, outside])

    def end_pieces(self) -> None:
        """Make what the thread itself has begun to copy since it last came here a group of pieces."""
        self.call_void("llvm.nvvm.cp.async.commit.group", [])

    def await_pieces(self, groups: int | None = None) -> None:
        """Wait for what the thread itself has begun to copy: for all, or for all but the last `groups` groups."""
        if groups is None:
            self.call_void("llvm.nvvm.cp.async.wait.all", [])
        else:
            self.call_void("llvm.nvvm.cp.async.wait.group", [self.constant(groups, I32)])

    def as_lanes(self, value: Value, type_: str) -> Value:
        """Return what a thread has of a scalar of its own as a vector of 16 lanes, or the other way round."""
        return Value(self, value.name, type_)

    def multiply_tiles(self, rows: Sequence[Value], columns: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        """Return `sums` plus the products of 16 rows of 32 signed bytes with 8 columns of as many unsigned ones.

        These are a thread's parts of what its warp multiplies: see mma.m16n8k32 in the manual of PTX.
        """
        return self._multiply("m16n8k32.row.col.s8.u8", rows, columns, sums)

    def multiply_float_tiles(
        self, rows: Sequence[Value], columns: Sequence[Value], sums: Sequence[Value]
    ) -> list[Value]:
        """Return f32 `sums` plus the products of 16 rows of 16 bf16 with 8 columns of as many, added in an order that
        only the GPU knows, which is the same for all rows and columns: see mma.m16n8k16 in the manual of PTX."""
        return self._multiply("m16n8k16.row.col.bf16", rows, columns, sums)

    def _multiply(
        self, shape: str, rows: Sequence[Value], columns: Sequence[Value], sums: Sequence[Value]
    ) -> list[Value]:
        element = sums[0].type
        type_ = f"!llvm.struct<({', '.join([element] * 4)})>"
        result = self.call(f"llvm.nvvm.mma.{shape}", [*rows, *columns, *sums], type_)
        return [self._result(element, f"llvm.extractvalue {result.name}[{i}] : {type_}") for i in range(4)]

    def store_lanes(self, value: Value, base: Value, offset: Value | int) -> None:
        """Store a vector to memory that others read only after a barrier."""
        Builder.store(self, self._part(value, 0), self._lane_address(base, offset, value.type), 0)

    def store_own(self, values: Sequence[Value], base: Value, offset: Value | int) -> None:
        """Store neighbours of 32 bits at an address of the thread's own, aligned to their size."""
        element, count = values[0].type, len(values)
        type_, at = vector(element, count), self.address(base, offset)
        name = self._hoist(("zeros", type_), type_, f"arith.constant dense<0{'.0' * (element == F32)}> : {type_}").name
        for i, value in enumerate(values):
            name = self._result(type_, f"vector.insert {value.name}, {name} [{i}] : {element} into {type_}").name
        self.emit(f"llvm.store {name}, {at.name} {{alignment = {4 * count} : i64}} : {type_}, {PTR}")
