"""Sampling by the running sum of masses in order of tokens: the token is the one where a random number falls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels._native import LEAST_SHARE_BITS, SampledRow, SampleRow
from quire.kernels.emit.builder import F32, F64, I1, I32, I64, LANES, Builder, Value
from quire.kernels.emit.logit_edits import banned
from quire.kernels.emit.logit_rows import MOST, VI64, LogitRow, added
from quire.kernels.emit.sampling_filters import all_of
from quire.kernels.emit.sampling_math import LEAST_KEY


@dataclass(frozen=True)
class RunningMasses:
    """Masses, or counts, of chunks of a row and of groups of 16 chunks, in scratch. `of` returns those of a vector."""

    row: LogitRow
    of: Callable[[Value], Value]

    def weigh(self) -> Value:
        """Emit all masses; return their sum."""
        row, layout, b = self.row, self.row.layout, self.row.b
        with b.each(0, layout.count) as chunk:
            self._weigh_chunk(chunk.index)
        groups = layout.count // LANES
        with b.each(0, groups) as group:
            self._weigh_group(group.index)
        return row.fold(lambda part: b.load(layout.masses, part * 128, VI64, 64), groups, 0, I64, added)

    def weigh_again(self, token: Value) -> None:
        """Emit the masses of a token's chunk and group, after its logit has changed."""
        row, b = self.row, self.row.b
        chunk = row.wide(token) // (row.layout.vectors * LANES)
        with b.once():
            self._weigh_chunk(chunk)
        with b.once():
            self._weigh_group(chunk // LANES)

    def mass_around(self, token: Value) -> Value:
        """Return the mass of a token's chunk."""
        row = self.row
        chunk = row.wide(token) // (row.layout.vectors * LANES)
        return row.b.load(row.layout.masses, chunk * 8, I64)

    def before(self, chunk: Value) -> Value:
        """Return the mass of all chunks before one; there are no vectors in this."""
        layout, b = self.row.layout, self.row.b
        group, mass = chunk // LANES, b.constant(0, I64)
        for memory, first, stop in ((layout.groups, b.index(0), group), (layout.masses, group * LANES, chunk)):
            with b.loop(first, stop, state=[mass]) as each:
                each.carry(each.state[0] + b.load(memory, each.index * 8, I64))
            mass = each.results[0]
        return mass

    def _weigh_chunk(self, chunk: Value) -> None:
        row, b = self.row, self.row.b
        with b.loop(*row.vectors_of(chunk), state=[b.constant(0, VI64)]) as part:
            part.carry(self.of(part.index) + part.state[0])
        b.store(b.fold_lanes(part.results[0], added), row.layout.masses, chunk * 8)

    def _weigh_group(self, group: Value) -> None:
        layout, b = self.row.layout, self.row.b
        masses = b.load(layout.masses, group * 128, VI64, 64)
        b.store(b.fold_lanes(masses, added), layout.groups, group * 8)

    def token_at(self, random: Value, total: Value) -> Value:
        """Return the token at this part, in [0, 1), of the total mass."""
        layout, b = self.row.layout, self.row.b
        place = b.convert("arith.fptoui", random * b.convert("arith.uitofp", total, F64), I64).min(total - 1).max(0)
        found, left = _pass(b, lambda i: b.load(layout.groups, i * 8, I64), 0, layout.count // LANES, place)
        first = found * LANES
        found, left = _pass(b, lambda i: b.load(layout.masses, i * 8, I64), first, first + LANES, left)
        vectors = self.row.vectors_of(found)
        found, left = _pass(b, lambda i: b.fold_lanes(self.of(i), added), *vectors, left)
        masses, token = self.of(found), found * LANES
        is_found = b.constant(0, I1)
        for lane in range(LANES):
            mass = b.lane(masses, lane)
            is_found = is_found | b.compare("ult", left, mass)
            left, token = b.select(is_found, left, left - mass), b.select(is_found, token, token + 1)
        return b.convert("arith.trunci", token.min(layout.size - 1), I32)


def _pass(
    b: Builder, load: Callable[[Value], Value], start: Value | int, stop: Value | int, left: Value
) -> tuple[Value, Value]:
    """Return the first number from `start` on where the running sum exceeds `left`, and what is left before it."""
    with b.loop(start, stop, state=[b.index(start), left]) as each:
        found, rest = each.state
        mass = load(each.index)
        goes_on = b.compare("eq", found, each.index) & b.compare("uge", rest, mass)
        each.carry(b.select(goes_on, found + 1, found), b.select(goes_on, rest - mass, rest))
    found, rest = each.results
    return found.min(b.index(stop) - 1), rest


@dataclass(frozen=True)
class TriedTokens:
    """Scratch for the tokens that are tried, i32, and their logits, f32."""

    tokens: Value
    logits: Value


def try_samples(row: LogitRow, most: Value, wanted: Value, tries: Value, tried: TriedTokens, result: Value) -> Value:
    """Emit up to `tries` samples from all tokens to SampledRow.TRIED, each from those that have not been sampled.

    Return the first one. `most` is the largest key. Logits of sampled tokens are -inf meanwhile.
    """
    b = row.b
    scale, reach = (b.load(wanted, at, F32) for at in (SampleRow.INVERSE_TEMPERATURE, SampleRow.REACH))
    masses = RunningMasses(row, all_of(row, most, scale, reach).masses)
    total = masses.weigh()
    least = total >> LEAST_SHARE_BITS
    with b.loop(0, tries, state=[total, b.index(0), b.constant(0, I32)]) as trial:
        left, count, _ = trial.state
        with b.loop(0, row.wide(b.compare("ugt", left, least)), state=trial.state) as once:
            token = masses.token_at(b.load(wanted, trial.index * 8 + SampleRow.RANDOMS, F64), left)
            before = masses.mass_around(token)
            _ban(row, token, tried, count)
            masses.weigh_again(token)
            first = b.select(b.compare("eq", count, 0), token, trial.state[2])
            once.carry(left - (before - masses.mass_around(token)), count + 1, first)
        trial.carry(*once.results)
    _, count, first = trial.results
    with b.each_scalar(0, count) as each:
        token = b.load(tried.tokens, each.index * 4, I32)
        b.store(b.load(tried.logits, each.index * 4, F32), row.logits, row.wide(token) * 4)
        b.store(token, result, each.index * 4 + SampledRow.TRIED)
    _store_count(b, count, result)
    return first


def try_likeliest(row: LogitRow, tries: Value, result: Value) -> None:
    """Emit the likeliest tokens, up to `tries`, to SampledRow.TRIED."""
    b = row.b
    with b.loop(0, tries, state=[b.constant(MOST, I32), b.constant(-1, I32), b.index(0)]) as trial:
        key, token = row.next_likeliest(*trial.state[:2])
        with b.once():
            b.store(token, result, trial.index * 4 + SampledRow.TRIED)
        is_there = row.wide(b.compare("sgt", key, LEAST_KEY))
        trial.carry(key, token, trial.state[2] + is_there)
    _store_count(b, trial.results[2], result)


def _ban(row: LogitRow, token: Value, tried: TriedTokens, count: Value) -> None:
    """Ban a token, which is number `count` of those that are tried."""
    b, place = row.b, row.wide(token) * 4
    logit = b.load(row.logits, place, F32)
    with b.once():
        b.store(token, tried.tokens, count * 4)
        b.store(logit, tried.logits, count * 4)
        b.store(banned(b), row.logits, place)


def _store_count(b: Builder, count: Value, result: Value) -> None:
    with b.once():
        b.store(b.convert("arith.trunci", count, I32), result, SampledRow.NUM_TRIED)
