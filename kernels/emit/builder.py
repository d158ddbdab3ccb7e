"""Builder of MLIR text: SSA values with operators, counted loops, constants hoisted to the function's entry.

Memory is addressed through `!llvm.ptr` and byte offsets, so no buffer needs a static shape. All kernels have the
signature `void kernel(void *const *buffers, const int64_t *dims, int64_t begin, int64_t end)`: the buffers of the
launch, the dims (sizes) of this step, and the range of work items for the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire.kernels._native import Dim

I1, I8, I16, I32, I64 = "i1", "i8", "i16", "i32", "i64"
BF16, F16, F32, F64 = "bf16", "f16", "f32", "f64"
PTR = "!llvm.ptr"
TILE = "!llvm.x86_amx"

LANES = 16
"""Logical lanes of every reduction and vector, whatever the width of the host's registers."""


def vector(element: str, lanes: int = LANES) -> str:
    """Return the MLIR type of a vector of `lanes` elements."""
    return f"vector<{lanes}x{element}>"


VF32, VI32 = vector(F32), vector(I32)


def element_of(type_: str) -> str:
    """Return the element type of a vector type, or a scalar type itself."""
    return type_[:-1].split("x", 1)[1] if type_.startswith("vector<") else type_


def lanes_of(type_: str) -> int:
    """Return the number of lanes of a vector type."""
    return int(type_.removeprefix("vector<").split("x", 1)[0])


def with_element(type_: str, element: str) -> str:
    """Return `type_` with another element type."""
    return type_.replace(element_of(type_), element)


@dataclass(frozen=True, eq=False)
class Value:
    """An SSA value. Operators emit `arith` operations; plain numbers become constants of the same type."""

    builder: Builder
    name: str
    type: str

    @property
    def is_float(self) -> bool:
        """True if the elements are floats."""
        return element_of(self.type) in (F64, F32, F16, BF16)

    def _binary(self, float_op: str, int_op: str, other: Value | int | float, swap: bool = False) -> Value:
        right = self.builder.as_value(other, self.type)
        pair = (right, self) if swap else (self, right)
        return self.builder.op(f"arith.{float_op if self.is_float else int_op}", pair, self.type)

    def __add__(self, other: Value | int | float) -> Value:
        return self if other == 0 and not self.is_float else self._binary("addf", "addi", other)

    def __sub__(self, other: Value | int | float) -> Value:
        return self._binary("subf", "subi", other)

    def __rsub__(self, other: int | float) -> Value:
        return self._binary("subf", "subi", other, swap=True)

    def __mul__(self, other: Value | int | float) -> Value:
        return self if other == 1 and not self.is_float else self._binary("mulf", "muli", other)

    def __truediv__(self, other: Value | int | float) -> Value:
        return self._binary("divf", "", other)

    def __floordiv__(self, other: Value | int) -> Value:
        """Divide unsigned: every index is at least zero."""
        return self if other == 1 else self._binary("", "divui", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("", "remui", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("", "andi", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("", "ori", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("", "xori", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("", "shli", other)

    def __rshift__(self, other: Value | int) -> Value:
        """Shift right logically (unsigned)."""
        return self._binary("", "shrui", other)

    def __lt__(self, other: Value | int | float) -> Value:
        return self.builder.compare("olt" if self.is_float else "slt", self, other)

    def __le__(self, other: Value | int) -> Value:
        return self.builder.compare("sle", self, other)

    def __ge__(self, other: Value | int) -> Value:
        return self.builder.compare("sge", self, other)

    def min(self, other: Value | int | float) -> Value:
        """Return the smaller value; a NaN in `self` is kept."""
        return self._choose("ogt", "minsi", other)

    def max(self, other: Value | int | float) -> Value:
        """Return the larger value; a NaN in `self` is kept."""
        return self._choose("olt", "maxsi", other)

    def _choose(self, predicate: str, int_op: str, other: Value | int | float) -> Value:
        if not self.is_float:
            return self._binary("", int_op, other)
        right = self.builder.as_value(other, self.type)
        return self.builder.select(self.builder.compare(predicate, self, right), right, self)

    def bitcast(self, element: str) -> Value:
        """Reinterpret the bits as elements of another type of the same size."""
        return self.builder.convert("arith.bitcast", self, with_element(self.type, element))


class Loop:
    """An open counted loop: `index`, the carried values `state`, which the next iteration starts with unless `carry`
    sets others, and `results` once it is closed."""

    def __init__(self, index: Value, state: list[Value]) -> None:
        self.index = index
        self.state = state
        self.results: list[Value] = []
        self.next_values = state

    def carry(self, *values: Value) -> None:
        """Set the carried values of the next iteration."""
        self.next_values = list(values)


class Builder:
    """Collects the text of one kernel function; its signature is in the module's docstring."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lines: list[str] = []
        self._constants: dict[tuple[int | float, str], Value] = {}
        self._entry: list[str] = []
        self._count = 0
        self.begin = Value(self, "%begin", I64)
        self.end = Value(self, "%end", I64)

    def text(self) -> str:
        """Return the function as MLIR text."""
        body = "\n".join([*self._entry, *self._lines])
        return f"func.func @{self.name}(%buffers: {PTR}, %dims: {PTR}, %begin: i64, %end: i64) {{\n{body}\nreturn\n}}\n"

    # Values

    def mlir_type(self, type_: str) -> str:
        """Return the MLIR type that values of a type have in the text."""
        return type_

    def _name(self) -> str:
        self._count += 1
        return f"%{self._count}"

    def emit(self, line: str) -> None:
        """Add one line of MLIR."""
        self._lines.append(line)

    def constant(self, value: int | float, type_: str) -> Value:
        """Return a constant, a splat if `type_` is a vector."""
        key = (value, type_)
        if key not in self._constants:
            literal = f"{float(value):.17e}" if element_of(type_) in (F64, F32, F16, BF16) else str(int(value))
            mlir_type = self.mlir_type(type_)
            attribute = f"dense<{literal}>" if mlir_type.startswith("vector") else literal
            name = f"%c{len(self._constants)}"
            self._entry.append(f"{name} = arith.constant {attribute} : {mlir_type}")
            self._constants[key] = Value(self, name, type_)
        return self._constants[key]

    def table(self, values: Sequence[int], element: str) -> Value:
        """Return the vector of the integers `values`."""
        name, type_ = f"%t{len(self._entry)}", vector(element, len(values))
        self._entry.append(f"{name} = arith.constant dense<{[*values]}> : {type_}")
        return Value(self, name, type_)

    def as_value(self, value: Value | int | float, type_: str) -> Value:
        """Return a number as a constant of the type, and a value unchanged."""
        return value if isinstance(value, Value) else self.constant(value, type_)

    def index(self, value: Value | int) -> Value:
        """Return `value` as an i64."""
        return self.as_value(value, I64)

    def _result(self, type_: str, operation: str) -> Value:
        """Add the line of an operation and return its result."""
        result = Value(self, self._name(), type_)
        self.emit(f"{result.name} = {operation}")
        return result

    def op(self, name: str, operands: Sequence[Value], type_: str) -> Value:
        """Emit an operation of the form `name operands : type`."""
        return self._result(type_, f"{name} {', '.join(v.name for v in operands)} : {self.mlir_type(type_)}")

    def convert(self, name: str, value: Value, type_: str) -> Value:
        """Emit a conversion of the form `name value : from to type`, unless the type is the same."""
        if value.type == type_:
            return value
        types = f"{self.mlir_type(value.type)} to {self.mlir_type(type_)}"
        return self._result(type_, f"{name} {value.name} : {types}")

    def compare(self, predicate: str, left: Value, right: Value | int | float) -> Value:
        """Compare by MLIR's name of the predicate: `slt`, `ogt`, ..."""
        other = self.as_value(right, left.type)
        operation = f"arith.{'cmpf' if left.is_float else 'cmpi'} {predicate}, {left.name}, {other.name}"
        return self._result(with_element(left.type, I1), f"{operation} : {self.mlir_type(left.type)}")

    def select(self, condition: Value, yes: Value, no: Value | int | float) -> Value:
        """Select `yes` where the condition holds, else `no`."""
        other = self.as_value(no, yes.type)
        types = [self.mlir_type(value.type) for value in (condition, yes)]
        types = types if types[0].startswith("vector") else types[1:]
        return self._result(yes.type, f"arith.select {condition.name}, {yes.name}, {other.name} : {', '.join(types)}")

    def fma(self, a: Value, b: Value, c: Value | float) -> Value:
        """Emit a * b + c with a single rounding."""
        return self.op("math.fma", [a, b, self.as_value(c, a.type)], a.type)

    def unary(self, name: str, value: Value) -> Value:
        """Emit an operation of one operand that keeps its type."""
        return self.op(name, [value], value.type)

    def broadcast(self, value: Value, lanes: int = LANES) -> Value:
        """Return a vector of copies of a scalar."""
        return self.convert("vector.broadcast", value, vector(value.type, lanes))

    def lane_numbers(self, lanes: int = LANES) -> Value:
        """Return the vector 0, 1, ... as i32."""
        type_ = vector(I32, lanes)
        return self._result(type_, f"arith.constant dense<{[*range(lanes)]}> : {type_}")

    def fold_lanes(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Reduce the lanes to a scalar with `combine`, in a tree: of 16 lanes by 8, 4, 2, 1."""
        width = lanes_of(value.type)
        while width > 1:
            width //= 2
            value = combine(self._slice(value, 0, width), self._slice(value, width, width))
        return self.lane(value, 0)

    def lane(self, value: Value, number: int) -> Value:
        """Return one lane of a vector."""
        element = element_of(value.type)
        return self._result(element, f"vector.extract {value.name}[{number}] : {element} from {value.type}")

    def with_lane(self, value: Value, number: int, lane: Value) -> Value:
        """Return a vector with another value in one lane."""
        return self._result(
            value.type, f"vector.insert {lane.name}, {value.name} [{number}] : {lane.type} into {value.type}"
        )

    def by_lane(self, operation: Callable[..., Value], *values: Value) -> Value:
        """Return the vector of the results of an operation on scalars, of the type of the last of `values`."""
        result = values[-1]
        for i in range(lanes_of(result.type)):
            result = self.with_lane(result, i, operation(*(self.lane(value, i) for value in values)))
        return result

    def half(self, value: Value, number: int) -> Value:
        """Return the lower (0) or upper (1) half of a vector's lanes."""
        width = lanes_of(value.type) // 2
        return self._slice(value, number * width, width)

    def parts(self, value: Value) -> list[Value]:
        """Return a vector's lanes in order, in vectors of LANES."""
        return [self._slice(value, start, LANES) for start in range(0, lanes_of(value.type), LANES)]

    def join(self, low: Value, high: Value) -> Value:
        """Concatenate the lanes of two vectors."""
        return self.shuffle(low, high, range(2 * lanes_of(low.type)))

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """Return the lanes of a vector whose numbers `order` lists."""
        return self.shuffle(value, value, order)

    def shuffle(self, low: Value, high: Value, order: Sequence[int]) -> Value:
        """Return the lanes of two vectors whose numbers `order` lists; those of `high` follow those of `low`."""
        operation = f"vector.shuffle {low.name}, {high.name} {[*order]} : {low.type}, {high.type}"
        return self._result(vector(element_of(low.type), len(order)), operation)

    def lanes_as(self, value: Value, element: str) -> Value:
        """Reinterpret the bits as lanes of an integer type of another width."""
        lanes = lanes_of(value.type) * int(element_of(value.type)[1:]) // int(element[1:])
        return self.convert("vector.bitcast", value, vector(element, lanes))

    def shift_right_signed(self, value: Value, bits: int) -> Value:
        """Shift right arithmetically."""
        return self.op("arith.shrsi", [value, self.constant(bits, value.type)], value.type)

    def opaque(self, value: Value) -> Value:
        """Return a vector as one that LLVM knows nothing about. Thus it does not reassociate chains of additions, which
        would need more registers."""
        return self._result(value.type, f'llvm.inline_asm "", "=x,0" {value.name} : ({value.type}) -> {value.type}')

    def _slice(self, value: Value, start: int, width: int) -> Value:
        part = f"{{offsets = [{start}], sizes = [{width}], strides = [1]}}"
        type_ = vector(element_of(value.type), width)
        return self._result(type_, f"vector.extract_strided_slice {value.name} {part} : {value.type} to {type_}")

    # Memory

    def buffer(self, number: Value | int) -> Value:
        """Return the address of the launch's buffer `number`."""
        return self.load(Value(self, "%buffers", PTR), number * 8, PTR)

    def dim(self, name: str) -> Value:
        """Return one of the step's sizes, an i64; named as in Dim."""
        return self.load(Value(self, "%dims", PTR), Dim[name] * 8, I64)

    def address(self, base: Value, offset: Value | int) -> Value:
        """Return `base` plus `offset` bytes."""
        if isinstance(offset, int) and offset == 0:
            return base
        place, types = (offset, PTR) if isinstance(offset, int) else (offset.name, f"{PTR}, i64")
        return self._result(PTR, f"llvm.getelementptr {base.name}[{place}] : ({types}) -> {PTR}, i8")

    def load(self, base: Value, offset: Value | int, type_: str, alignment: int | None = None) -> Value:
        """Load a value from `base` plus `offset` bytes; `alignment` is in bytes."""
        source = self.address(base, offset)
        aligned = f" {{alignment = {alignment} : i64}}" if alignment else ""
        return self._result(type_, f"llvm.load {source.name}{aligned} : {PTR} -> {type_}")

    def load_index(self, base: Value, number: Value) -> Value:
        """Load the i32 `number` of an array as an i64."""
        return self.convert("arith.extui", self.load(base, number * 4, I32), I64)

    def store(self, value: Value, base: Value, offset: Value | int, alignment: int | None = None) -> None:
        """Store a value at `base` plus `offset` bytes; `alignment` is in bytes."""
        target = self.address(base, offset)
        aligned = f" {{alignment = {alignment} : i64}}" if alignment else ""
        self.emit(f"llvm.store {value.name}, {target.name}{aligned} : {value.type}, {PTR}")

    def prefetch(self, base: Value, offset: Value | int, level: int) -> None:
        """Prefetch the cache line at `base` plus `offset` bytes into the cache of that level, 1 or 2.

        An address that is not readable is no error.
        """
        at = self.address(base, offset)
        hint = {1: 3, 2: 2}[level]
        self.emit(
            f'"llvm.intr.prefetch"({at.name}) <{{rw = 0 : i32, hint = {hint} : i32, cache = 1 : i32}}> : ({PTR}) -> ()'
        )

    def keep_order(self) -> None:
        """Keep memory accesses before and after this call in the order in which they are emitted. LLVM would move all
        prefetches of unrolled loops behind the last load, where they are too many at once."""
        self.emit('llvm.inline_asm has_side_effects "", "" : () -> ()')

    def scratch(self, size: int) -> Value:
        """Reserve `size` bytes on the stack, aligned to a cache line, for the whole call."""
        count = self.constant(size, I64)
        name = self._name()
        self._entry.append(f"{name} = llvm.alloca {count.name} x i8 {{alignment = 64 : i64}} : (i64) -> {PTR}")
        return Value(self, name, PTR)

    def own_scratch(self, size: int) -> Value:
        """Reserve scratch that an iteration of `each` writes and reads."""
        return self.scratch(size)

    def staged(self, base: Value, size: int, memory: Value | None = None) -> Value:
        """Return where `size` bytes of f32, a multiple of 64, are read from when that is done several times: maybe from
        scratch, by default of its own."""
        return base

    def call(self, name: str, operands: Sequence[Value], type_: str) -> Value:
        """Call the LLVM intrinsic `name` and return its result."""
        return self._result(type_, f"{self._call_text(name, operands)} -> {self.mlir_type(type_)}")

    def call_void(self, name: str, operands: Sequence[Value]) -> None:
        """Call the LLVM intrinsic `name`, which returns nothing."""
        self.emit(f"{self._call_text(name, operands)} -> ()")

    def _call_text(self, name: str, operands: Sequence[Value]) -> str:
        types = ", ".join(self.mlir_type(v.type) for v in operands)
        return f'llvm.call_intrinsic "{name}"({", ".join(v.name for v in operands)}) : ({types})'

    # Control flow

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1, state: Sequence[Value] = ()) -> Iterator[Loop]:
        """Open `for index in range(start, stop, step)`, carrying `state` from one iteration to the next."""
        bounds = [self.index(start), self.index(stop), self.index(step)]
        index = Value(self, self._name(), I64)
        carried = [Value(self, self._name(), v.type) for v in state]
        name, types = self._name(), ", ".join(self.mlir_type(v.type) for v in state)
        head = f"scf.for {index.name} = {bounds[0].name} to {bounds[1].name} step {bounds[2].name}"
        if state:
            pairs = ", ".join(f"{c.name} = {v.name}" for c, v in zip(carried, state, strict=True))
            head = f"{name}:{len(state)} = {head} iter_args({pairs}) -> ({types})"
        self.emit(f"{head} : i64 {{")
        loop = Loop(index, carried)
        yield loop
        if state:
            self.emit(f"scf.yield {', '.join(v.name for v in loop.next_values)} : {types}")
        self.emit("}")
        loop.results = [Value(self, f"{name}#{i}", v.type) for i, v in enumerate(state)]

    @contextmanager
    def each(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Loop]:
        """Open a loop of which no iteration reads what another one writes. No other loop does for a builder whose items
        are computed by many threads."""
        with self.loop(start, stop, step) as loop:
            yield loop

    @contextmanager
    def each_scalar(self, start: Value | int, stop: Value | int) -> Iterator[Loop]:
        """Open a loop as `each` does, in which there are no vectors."""
        with self.loop(start, stop) as loop:
            yield loop

    @contextmanager
    def once(self) -> Iterator[None]:
        """Open what is done for the whole item, between loops of `each`."""
        yield

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Open a block that runs only if the condition holds."""
        self.emit(f"scf.if {condition.name} {{")
        yield
        self.emit("}")

    @contextmanager
    def items(self) -> Iterator[Value]:
        """Open the loop over this thread's work items."""
        with self.loop(self.begin, self.end) as loop:
            yield loop.index
