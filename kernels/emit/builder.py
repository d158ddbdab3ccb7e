"""Builder of MLIR text: values with operators, counted loops, constants hoisted to the function's entry.

Memory is addressed through `!llvm.ptr` and byte offsets, so no buffer needs a static shape. All kernels have the
signature `void kernel(void *const *buffers, const int64_t *dims, int64_t begin, int64_t end)`: the buffers of the
launch, the dims (sizes) of this step, and the range of work items for the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.kernels._native import Dim
from quire.kernels.emit.value import (
    BF16,
    F16,
    F32,
    I1,
    I64,
    LANES,
    PTR,
    VI32,
    Loop,
    Value,
    element_of,
    lanes_of,
    vector,
    with_element,
)


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
            literal = f"{float(value):.17e}" if element_of(type_) in (F32, F16, BF16) else str(int(value))
            attribute = f"dense<{literal}> : {type_}" if type_.startswith("vector") else f"{literal} : {type_}"
            name = f"%c{len(self._constants)}"
            self._entry.append(f"{name} = arith.constant {attribute}")
            self._constants[key] = Value(self, name, type_)
        return self._constants[key]

    def as_value(self, value: Value | int | float, type_: str) -> Value:
        """Return a number as a constant of the type, and a value unchanged."""
        return value if isinstance(value, Value) else self.constant(value, type_)

    def index(self, value: Value | int) -> Value:
        """Return `value` as an i64."""
        return self.as_value(value, I64)

    def op(self, name: str, operands: Sequence[Value], type_: str) -> Value:
        """Emit an operation of the form `name operands : type`."""
        result = Value(self, self._name(), type_)
        self.emit(f"{result.name} = {name} {', '.join(v.name for v in operands)} : {type_}")
        return result

    def convert(self, name: str, value: Value, type_: str) -> Value:
        """Emit a conversion of the form `name value : from to type`, unless the type is the same."""
        if value.type == type_:
            return value
        result = Value(self, self._name(), type_)
        self.emit(f"{result.name} = {name} {value.name} : {value.type} to {type_}")
        return result

    def compare(self, predicate: str, left: Value, right: Value | int | float) -> Value:
        """Compare by MLIR's name of the predicate: `slt`, `ogt`, ..."""
        other = self.as_value(right, left.type)
        result = Value(self, self._name(), with_element(left.type, I1))
        operation = "cmpf" if left.is_float else "cmpi"
        self.emit(f"{result.name} = arith.{operation} {predicate}, {left.name}, {other.name} : {left.type}")
        return result

    def select(self, condition: Value, yes: Value, no: Value | int | float) -> Value:
        """Select `yes` where the condition holds, else `no`."""
        other = self.as_value(no, yes.type)
        result = Value(self, self._name(), yes.type)
        types = f"{condition.type}, {yes.type}" if condition.type.startswith("vector") else yes.type
        self.emit(f"{result.name} = arith.select {condition.name}, {yes.name}, {other.name} : {types}")
        return result

    def fma(self, a: Value, b: Value, c: Value | float) -> Value:
        """Emit a * b + c with a single rounding."""
        return self.op("math.fma", [a, b, self.as_value(c, a.type)], a.type)

    def unary(self, name: str, value: Value) -> Value:
        """Emit an operation of one operand that keeps its type."""
        return self.op(name, [value], value.type)

    def broadcast(self, value: Value, lanes: int = LANES) -> Value:
        """Return a vector of copies of a scalar."""
        result = Value(self, self._name(), vector(value.type, lanes))
        self.emit(f"{result.name} = vector.broadcast {value.name} : {value.type} to {result.type}")
        return result

    def lane_numbers(self) -> Value:
        """Return the vector 0, 1, ... 15 as i32."""
        result = Value(self, self._name(), VI32)
        numbers = ", ".join(str(i) for i in range(LANES))
        self.emit(f"{result.name} = arith.constant dense<[{numbers}]> : {VI32}")
        return result

    def fold_lanes(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Reduce 16 lanes to a scalar with `combine`, by the tree 8, 4, 2, 1."""
        width = LANES
        while width > 1:
            width //= 2
            value = combine(self._slice(value, 0, width), self._slice(value, width, width))
        result = Value(self, self._name(), element_of(value.type))
        self.emit(f"{result.name} = vector.extract {value.name}[0] : {result.type} from {value.type}")
        return result

    def half(self, value: Value, number: int) -> Value:
        """Return the lower (0) or upper (1) half of a vector's lanes."""
        width = lanes_of(value.type) // 2
        return self._slice(value, number * width, width)

    def join(self, low: Value, high: Value) -> Value:
        """Concatenate the lanes of two vectors."""
        lanes = 2 * lanes_of(low.type)
        result = Value(self, self._name(), vector(element_of(low.type), lanes))
        mask = ", ".join(str(i) for i in range(lanes))
        self.emit(f"{result.name} = vector.shuffle {low.name}, {high.name} [{mask}] : {low.type}, {high.type}")
        return result

    def lanes_as(self, value: Value, element: str) -> Value:
        """Reinterpret the bits as lanes of an integer type of another width."""
        lanes = lanes_of(value.type) * int(element_of(value.type)[1:]) // int(element[1:])
        return self.convert("vector.bitcast", value, vector(element, lanes))

    def shift_right_signed(self, value: Value, bits: int) -> Value:
        """Shift right arithmetically."""
        return self.op("arith.shrsi", [value, self.constant(bits, value.type)], value.type)

    def _slice(self, value: Value, start: int, width: int) -> Value:
        result = Value(self, self._name(), vector(element_of(value.type), width))
        self.emit(
            f"{result.name} = vector.extract_strided_slice {value.name} "
            f"{{offsets = [{start}], sizes = [{width}], strides = [1]}} : {value.type} to {result.type}"
        )
        return result

    # Memory

    def buffer(self, number: int) -> Value:
        """Return the address of the launch's buffer `number`."""
        return self.load(Value(self, "%buffers", PTR), number * 8, PTR)

    def dim(self, name: str) -> Value:
        """Return one of the step's sizes, an i64; the names are in DIM_NUMBERS."""
        return self.load(Value(self, "%dims", PTR), Dim[name] * 8, I64)

    def address(self, base: Value, offset: Value | int) -> Value:
        """Return `base` plus `offset` bytes."""
        if isinstance(offset, int) and offset == 0:
            return base
        result = Value(self, self._name(), PTR)
        if isinstance(offset, int):
            self.emit(f"{result.name} = llvm.getelementptr {base.name}[{offset}] : ({PTR}) -> {PTR}, i8")
        else:
            self.emit(f"{result.name} = llvm.getelementptr {base.name}[{offset.name}] : ({PTR}, i64) -> {PTR}, i8")
        return result

    def load(self, base: Value, offset: Value | int, type_: str, alignment: int | None = None) -> Value:
        """Load a value from `base` plus `offset` bytes; `alignment` is in bytes."""
        source = self.address(base, offset)
        result = Value(self, self._name(), type_)
        aligned = f" {{alignment = {alignment} : i64}}" if alignment else ""
        self.emit(f"{result.name} = llvm.load {source.name}{aligned} : {PTR} -> {type_}")
        return result

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

    def scratch(self, size: int) -> Value:
        """Reserve `size` bytes on the stack, aligned to a cache line, for the whole call."""
        count = self.constant(size, I64)
        name = self._name()
        self._entry.append(f"{name} = llvm.alloca {count.name} x i8 {{alignment = 64 : i64}} : (i64) -> {PTR}")
        return Value(self, name, PTR)

    def call(self, name: str, operands: Sequence[Value], type_: str) -> Value:
        """Call the LLVM intrinsic `name` and return its result."""
        result = Value(self, self._name(), type_)
        self.emit(f"{result.name} = {self._call_text(name, operands)} -> {type_}")
        return result

    def call_void(self, name: str, operands: Sequence[Value]) -> None:
        """Call the LLVM intrinsic `name`, which returns nothing."""
        self.emit(f"{self._call_text(name, operands)} -> ()")

    @staticmethod
    def _call_text(name: str, operands: Sequence[Value]) -> str:
        types = ", ".join(v.type for v in operands)
        return f'llvm.call_intrinsic "{name}"({", ".join(v.name for v in operands)}) : ({types})'

    # Control flow

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1, state: Sequence[Value] = ()) -> Iterator[Loop]:
        """Open `for index in range(start, stop, step)`, carrying `state` from one iteration to the next."""
        bounds = [self.index(start), self.index(stop), self.index(step)]
        index = Value(self, self._name(), I64)
        carried = [Value(self, self._name(), v.type) for v in state]
        name, types = self._name(), ", ".join(v.type for v in state)
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
