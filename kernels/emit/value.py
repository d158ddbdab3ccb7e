"""Types and values of emitted MLIR: an SSA value is a Python object with operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

I1, I8, I16, I32, I64 = "i1", "i8", "i16", "i32", "i64"
BF16, F16, F32 = "bf16", "f16", "f32"
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


class OperationBuilder(Protocol):
    """The part of `Builder` that the operators of a `Value` call."""

    def as_value(self, value: Value | int | float, type_: str) -> Value: ...  # noqa: D102 - see Builder
    def op(self, name: str, operands: Sequence[Value], type_: str) -> Value: ...  # noqa: D102
    def convert(self, name: str, value: Value, type_: str) -> Value: ...  # noqa: D102
    def compare(self, predicate: str, left: Value, right: Value | int | float) -> Value: ...  # noqa: D102
    def select(self, condition: Value, yes: Value, no: Value | int | float) -> Value: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class Value:
    """An SSA value. Operators emit `arith` operations; plain numbers become constants of the same type."""

    builder: OperationBuilder
    name: str
    type: str

    @property
    def is_float(self) -> bool:
        """True if the elements are floats."""
        return element_of(self.type) in (F32, F16, BF16)

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
    """An open counted loop: `index`, the carried values `state`, and `results` once it is closed."""

    def __init__(self, index: Value, state: list[Value]) -> None:
        self.index = index
        self.state = state
        self.results: list[Value] = []
        self._next: list[Value] | None = None

    def carry(self, *values: Value) -> None:
        """Set the carried values of the next iteration."""
        self._next = list(values)

    @property
    def next_values(self) -> list[Value]:
        """Carried values that the next iteration starts with."""
        return self.state if self._next is None else self._next
