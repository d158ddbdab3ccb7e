"""A row of logits of the whole vocabulary, as the loops of sampling see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels.emit.builder import I32, I64, LANES, VF32, VI32, Builder, Value, vector
from quire.kernels.emit.layout import round_up
from quire.kernels.emit.sampling_math import LEAST_KEY, order_key

MOST, LEAST = 0x7FFFFFFF, -0x80000000
"""Integers above and below all keys of numbers."""

VI64 = vector(I64)

_LINE = 64  # bytes of 16 lanes
_MOST_CHUNKS = 2048

Part = Callable[[Value], Value]


@dataclass(frozen=True)
class RowScratch:
    """Scratch of a vocabulary of `size` tokens, which is divided into `count` chunks of `vectors` vectors."""

    b: Builder
    size: int
    maxima: Value  # the key of the largest logit of each chunk
    masses: Value  # the mass of each chunk
    partial: Value
    groups: Value

    @classmethod
    def of(cls, b: Builder, size: int) -> RowScratch:
        """Return the layout, with its scratch."""
        count = chunks_of(size)
        return cls(b, size, *(b.scratch(n) for n in (count * 4, count * 8, 2 * _LINE, count // LANES * 8)))

    @property
    def vectors(self) -> int:
        """The number of vectors of a chunk."""
        return 4 * -(-self.size // (4 * LANES * _MOST_CHUNKS))

    @property
    def count(self) -> int:
        """The number of chunks; the last ones may be empty."""
        return chunks_of(self.size)


def chunks_of(size: int) -> int:
    """Return the number of chunks of a vocabulary, a multiple of 16."""
    tokens = 4 * LANES * -(-size // (4 * LANES * _MOST_CHUNKS))
    return round_up(-(-size // tokens), LANES)


@dataclass(frozen=True)
class LogitRow:
    """The logits of one row.

    Maxima of chunks let later passes skip those that hold nothing of interest. Sums are of integers.
    """

    layout: RowScratch
    logits: Value

    @property
    def b(self) -> Builder:
        """The builder."""
        return self.layout.b

    @property
    def num_vectors(self) -> int:
        """The number of vectors of logits."""
        return -(-self.layout.size // LANES)

    def wide(self, value: Value) -> Value:
        """Return an i32, or a condition, as an i64."""
        return self.b.convert("arith.extui", value, I64)

    # Vectors

    def numbers(self, part: Value) -> Value:
        """Return the tokens of a vector."""
        b = self.b
        return b.broadcast(b.convert("arith.trunci", part * LANES, I32)) + b.lane_numbers()

    def values(self, part: Value) -> Value:
        """Return a vector of logits; lanes beyond the vocabulary have any value."""
        return self.b.load(self.logits, part * _LINE, VF32, _LINE)

    def keys(self, part: Value) -> Value:
        """Return the keys of a vector: those of NaNs are above all others, LEAST is beyond the vocabulary."""
        b = self.b
        keys = order_key(b, self.values(part))
        keys = b.select(b.compare("slt", keys, LEAST_KEY), b.constant(MOST, VI32), keys)
        if self.layout.size % LANES == 0:
            return keys
        return b.select(b.compare("slt", self.numbers(part), self.layout.size), keys, LEAST)

    # Reductions

    def vectors_of(self, chunk: Value) -> tuple[Value, Value]:
        """Return the first vector of a chunk, and that after its last one."""
        first = chunk * self.layout.vectors
        return first, (first + self.layout.vectors).min(self.num_vectors)

    def fold(self, load: Part, count: int, start: int, type_: str, combine: Callable[[Value, Value], Value]) -> Value:
        """Return the lanes of `count` vectors, those that `load` returns, combined with `start` to a scalar."""
        b, span = self.b, -(-count // LANES)
        with b.each(0, LANES) as group:
            first = group.index * span
            with b.loop(first, (first + span).min(count), state=[b.constant(start, vector(type_))]) as part:
                part.carry(combine(part.state[0], load(part.index)))
            self._keep(part.results[0], type_, combine, group.index)
        return b.fold_lanes(b.load(self.layout.partial, 0, vector(type_), _LINE), combine)

    def sum_from(self, key: Value, load: Part) -> Value:
        """Return the sum of the i64 that `load` returns for vectors, 0 for keys below `key`: chunks of such are
        skipped."""
        b = self.b
        with b.each(0, LANES) as group:
            with b.loop(group.index, self.layout.count, LANES, state=[b.constant(0, VI64)]) as chunk:
                first, stop = self.vectors_of(chunk.index)
                largest = b.load(self.layout.maxima, chunk.index * 4, I32)
                stop = b.select(b.compare("sge", largest, key), stop, first)
                with b.loop(first, stop, state=chunk.state) as part:
                    part.carry(part.state[0] + load(part.index))
                chunk.carry(part.results[0])
            self._keep(chunk.results[0], I64, added, group.index)
        return b.fold_lanes(b.load(self.layout.partial, 0, VI64, _LINE), added)

    def _keep(self, value: Value, type_: str, combine: Callable[[Value, Value], Value], group: Value) -> None:
        b = self.b
        b.store(b.fold_lanes(value, combine), self.layout.partial, group * (8 if type_ == I64 else 4))

    # The likeliest

    def find_maxima(self) -> Value:
        """Emit the maxima of chunks; return the largest key."""
        b = self.b
        with b.each(0, self.layout.count) as chunk:
            with b.loop(*self.vectors_of(chunk.index), state=[b.constant(LEAST, VI32)]) as part:
                part.carry(self.keys(part.index).max(part.state[0]))
            b.store(b.fold_lanes(part.results[0], larger), self.layout.maxima, chunk.index * 4)
        return self.largest()

    def largest(self) -> Value:
        """Return the largest of the maxima."""
        return self.fold(self._maxima, self.layout.count // LANES, LEAST, I32, larger)

    def _maxima(self, part: Value) -> Value:
        return self.b.load(self.layout.maxima, part * _LINE, VI32, _LINE)

    def first_with(self, key: Value, after: Value | int = -1) -> Value:
        """Return the first token above `after` with the largest of the maxima, in the first such chunk."""
        b, wanted = self.b, self.b.broadcast(key)

        def places(part: Value) -> Value:
            return b.select(b.compare("eq", self._maxima(part), wanted), self.numbers(part), MOST)

        count = self.layout.count
        chunk = self.wide(self.fold(places, count // LANES, count - 1, I32, smaller))
        with b.loop(*self.vectors_of(chunk), state=[b.constant(MOST, VI32)]) as part:
            numbers = self.numbers(part.index)
            later = b.compare("sgt", numbers, b.broadcast(b.as_value(after, I32)))
            is_found = b.compare("eq", self.keys(part.index), wanted) & later
            part.carry(b.select(is_found, numbers, MOST).min(part.state[0]))
        return b.fold_lanes(part.results[0], smaller)

    def first_from(self, key: int) -> Value:
        """Return the first token whose key is at least `key`."""
        b = self.b

        def numbers(part: Value) -> Value:
            return b.select(b.compare("sge", self.keys(part), key), self.numbers(part), MOST)

        return self.fold(numbers, self.num_vectors, self.layout.size - 1, I32, smaller)

    def next_likeliest(self, key: Value, token: Value) -> tuple[Value, Value]:
        """Return the likeliest token after one, key and number, of which all before have been returned.

        Maxima become those of the tokens that come after it.
        """
        b = self.b
        best = self.largest()
        found = self.first_with(best, b.select(b.compare("eq", best, key), token, b.constant(-1, I32)))
        with b.once():
            chunk = self.wide(found // (self.layout.vectors * LANES))
            with b.loop(*self.vectors_of(chunk), state=[b.constant(LEAST, VI32)]) as part:
                keys, last = self.keys(part.index), b.broadcast(best)
                later = b.compare("eq", keys, last) & b.compare("sgt", self.numbers(part.index), b.broadcast(found))
                left = b.select(b.compare("slt", keys, last) | later, keys, LEAST)
                part.carry(left.max(part.state[0]))
            b.store(b.fold_lanes(part.results[0], larger), self.layout.maxima, chunk * 4)
        return best, found

    def rank(self, token: Value, key: Value) -> Value:
        """Return the rank of a token, from 1."""
        b, wanted, number = self.b, self.b.broadcast(key), self.b.broadcast(token)

        def before(part: Value) -> Value:
            keys = self.keys(part)
            tied = b.compare("eq", keys, wanted) & b.compare("slt", self.numbers(part), number)
            return b.convert("arith.extui", b.compare("sgt", keys, wanted) | tied, VI32)

        return self.fold(before, self.num_vectors, 0, I32, added) + 1


def larger(left: Value, right: Value) -> Value:
    """Return the larger value."""
    return left.max(right)


def smaller(left: Value, right: Value) -> Value:
    """Return the smaller value."""
    return left.min(right)


def added(left: Value, right: Value) -> Value:
    """Return the sum."""
    return left + right
