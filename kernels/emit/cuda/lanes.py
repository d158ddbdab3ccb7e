"""A builder whose vectors have a lane in each of 16 threads: see warps.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.kernels.emit.builder import (
    BF16,
    F16,
    F32,
    I1,
    I16,
    I32,
    I64,
    LANES,
    Builder,
    Value,
    element_of,
    lanes_of,
    vector,
    with_element,
)

_SEGMENT = 0x101F  # shuffles stay within 16 threads


class LaneBuilder(Builder):
    """Emits operations on vectors for a thread of half a warp. `%lane` is its number, and `%mates` are all 16."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hoisted: dict[object, Value] = {}

    def mlir_type(self, type_: str) -> str:
        """See Builder: what a thread has of a value."""
        if not type_.startswith("vector"):
            return type_
        parts = parts_of(type_)
        return element_of(type_) if parts == 1 else vector(element_of(type_), parts)

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
        if parts_of(value.type) == 1:
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
        if narrow == I64:
            low, high = (self.convert("arith.trunci", half, I32) for half in (value, value >> 32))
            low, high = (self.convert("arith.extui", self._exchange(kind, half, operand), I64) for half in (low, high))
            return low | high << 32
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
        if parts_of(type_) == 1:
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
        parts = [self._part(value, i) for i in range(parts_of(value.type))]
        here = self._is_in([i % lanes == number % LANES for i in range(LANES)])
        parts[number // LANES] = self.select(here, lane, parts[number // LANES])
        return self._of_parts(parts, value.type)

    def by_lane(self, operation: Callable[..., Value], *values: Value) -> Value:
        """See Builder."""
        type_ = values[-1].type
        results = [operation(*(self._part(value, i) for value in values)) for i in range(parts_of(type_))]
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


def parts_of(type_: str) -> int:
    """Return the number of scalars of a thread that make a vector."""
    return max(lanes_of(type_) // LANES, 1)
