"""The tokens that top_k, top_p and min_p leave, and their masses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.kernels._native import SampleRow
from quire.kernels.emit.builder import F32, F64, I32, I64, Value
from quire.kernels.emit.logit_rows import VI64, LogitRow
from quire.kernels.emit.sampling_math import LEAST_KEY, key_value, mass_of, order_key

_PROBES = 6  # of distances from the likeliest, 1, 2, 4, ... temperatures, within which enough tokens may be


class Bound(NamedTuple):
    """The least likely token that is left: its key, and its number, above which tokens with the same key are not."""

    key: Value
    token: Value

    def holds(self, keys: Value, tokens: Value) -> Value:
        """Return whether tokens, one or many, are left."""
        b = keys.builder
        key, token = (value if keys.type == I32 else b.broadcast(value) for value in self)
        return b.compare("sgt", keys, key) | b.compare("eq", keys, key) & b.compare("sle", tokens, token)


@dataclass(frozen=True)
class Candidates:
    """Tokens within `reach` (negative) of the largest logit, times `scale`, and within the bound."""

    row: LogitRow
    most: Value  # key of the largest logit
    scale: Value
    reach: Value
    bound: Bound

    def likeliest(self, top_k: Value) -> Candidates:
        """Return the `top_k` likeliest of them, or all if it is 0."""
        return self._when(self.row.b.compare("sgt", top_k, 0), lambda: self._counted(top_k))

    def nucleus(self, top_p: Value) -> Candidates:
        """Return the fewest of the likeliest with at least this part of the mass, or all if it is 1."""
        return self._when(self.row.b.compare("olt", top_p, 1.0), lambda: self._weighed(top_p))

    def masses(self, part: Value) -> Value:
        """Return the masses of a vector, 0 for other tokens."""
        b = self.row.b
        at = self._distances(part)
        is_inside = self._are_within_bound(part) & b.compare("oge", at, b.broadcast(self.reach))
        return b.select(is_inside, mass_of(b, at), 0)

    def ones(self, part: Value) -> Value:
        """Return 1 for each token of a vector within the bound, 0 for others."""
        return self.row.b.convert("arith.extui", self._are_within_bound(part), VI64)

    def _are_within_bound(self, part: Value) -> Value:
        return self.bound.holds(self.row.keys(part), self.row.numbers(part))

    def _distances(self, part: Value) -> Value:
        b = self.row.b
        logits = self.row.values(part)
        return (logits - b.broadcast(key_value(b, self.most))) * b.broadcast(self.scale)

    def _counts(self, part: Value) -> Value:
        """Return 1 for each token of a vector within reach, else 0."""
        b = self.row.b
        is_inside = b.compare("oge", self._distances(part), b.broadcast(self.reach))
        is_token = b.compare("sge", self.row.keys(part), LEAST_KEY)
        return b.convert("arith.extui", is_inside & is_token, VI64)

    def _when(self, condition: Value, narrowed: Callable[[], Bound]) -> Candidates:
        """Return the candidates with another bound if the condition holds."""
        b = self.row.b
        with b.loop(0, self.row.wide(condition), state=[*self.bound]) as once:
            once.carry(*narrowed())
        return replace(self, bound=Bound(*once.results))

    def _counted(self, top_k: Value) -> Bound:
        """Return the bound of the `top_k` likeliest, or of all if there are fewer."""
        total = self.row.sum_from(self.bound.key, self._counts)
        return self._bound(self._counts, total.min(top_k), lambda _: self.row.b.constant(1, I64))

    def _weighed(self, top_p: Value) -> Bound:
        """Return the bound of the fewest of the likeliest with at least this part of the mass."""
        b = self.row.b
        total = self.row.sum_from(self.bound.key, self.masses)
        share = b.unary("math.ceil", b.convert("arith.uitofp", total, F64) * top_p)
        needed = b.convert("arith.fptoui", share, I64).max(1).min(total)

        def mass(key: Value) -> Value:
            distance = (key_value(b, key) - key_value(b, self.most)) * self.scale
            return mass_of(b, distance).max(1)

        return self._bound(self.masses, needed, mass)

    def _bound(self, weights: Callable[[Value], Value], needed: Value, weight: Callable[[Value], Value]) -> Bound:
        """Return the bound of the fewest likeliest tokens whose `weights` are `needed`, which all together have.

        `weight` returns that of a token by its key.
        """
        key, above = self._least_key(weights, needed)
        each = weight(key)
        return Bound(key, self._last_tie(weights, key, (needed - above + each - 1) // each))

    def _from(self, weights: Callable[[Value], Value], key: Value) -> Value:
        """Return the weight of all tokens from a key on."""
        b, row = self.row.b, self.row

        def load(part: Value) -> Value:
            return b.select(b.compare("sge", row.keys(part), b.broadcast(key)), weights(part), 0)

        return row.sum_from(key, load)

    def _least_key(self, weights: Callable[[Value], Value], needed: Value) -> tuple[Value, Value]:
        """Return the largest key from which on tokens weigh `needed`, and the weight of those above it."""
        b = self.row.b
        largest, step = key_value(b, self.most), b.constant(1.0, F32) / self.scale
        with b.loop(0, _PROBES, state=[self.bound.key, step]) as probe:
            low, distance = probe.state
            key = order_key(b, largest - distance).max(low)
            is_enough = b.compare("sge", self._from(weights, key), needed)
            probe.carry(b.select(is_enough, key, low), distance + distance)
        low, high = (b.convert("arith.extsi", key, I64) for key in (probe.results[0], self.most))
        with b.loop(0, _bits(high - low), state=[low, high]) as search:
            low, high = search.state
            middle = low + ((high - low + 1) >> 1)
            is_enough = b.compare("sge", self._from(weights, b.convert("arith.trunci", middle, I32)), needed)
            search.carry(b.select(is_enough, middle, low), b.select(is_enough, high, middle - 1))
        key = b.convert("arith.trunci", search.results[0], I32)
        return key, self._from(weights, key + 1)

    def _last_tie(self, weights: Callable[[Value], Value], key: Value, count: Value) -> Value:
        """Return the token up to which so many candidates have this key; the bound's if no more have it."""
        b, row = self.row.b, self.row

        def ties(token: Value) -> Value:
            def load(part: Value) -> Value:
                is_tied = b.compare("eq", row.keys(part), b.broadcast(key))
                is_tied = is_tied & b.compare("sle", row.numbers(part), b.broadcast(token))
                return b.select(is_tied & b.compare("ne", weights(part), 0), b.constant(1, VI64), 0)

            return row.sum_from(key, load)

        most = b.select(b.compare("eq", key, self.bound.key), self.bound.token, row.layout.size)
        has_more = b.compare("sgt", ties(most), count)
        steps = row.wide(has_more) * row.layout.size.bit_length()
        with b.loop(0, steps, state=[b.constant(0, I32), most]) as search:
            low, high = search.state
            middle = (low + high) >> 1
            is_enough = b.compare("sge", ties(middle), count)
            search.carry(b.select(is_enough, low, middle + 1), b.select(is_enough, middle, high))
        return search.results[1]


def _bits(value: Value) -> Value:
    """Return the number of bits of an i64 from 0 to 2^32."""
    b = value.builder
    bits = b.constant(0, I64)
    for bit in range(33):
        bits = bits + b.convert("arith.extui", b.compare("sge", value, 1 << bit), I64)
    return bits


def all_of(row: LogitRow, most: Value, scale: Value, reach: Value) -> Candidates:
    """Return the tokens of a row within reach of the largest key, `most`."""
    b = row.b
    return Candidates(row, most, scale, reach, Bound(b.constant(LEAST_KEY, I32), b.constant(row.layout.size, I32)))


def candidates_of(row: LogitRow, most: Value, wanted: Value) -> Candidates:
    """Return the candidates that the filters of the SampleRow at `wanted` leave; `most` is the largest key."""
    b = row.b
    scale, reach = (b.load(wanted, at, F32) for at in (SampleRow.INVERSE_TEMPERATURE, SampleRow.REACH))
    top_k = row.wide(b.load(wanted, SampleRow.TOP_K, I32))
    likeliest = all_of(row, most, scale, reach).likeliest(top_k)
    return likeliest.nucleus(b.load(wanted, SampleRow.TOP_P, F64))
