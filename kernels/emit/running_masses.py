"""The running sum of the masses of candidates, in order of tokens: where a random number falls, a token is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels._native import SampleRow
from quire.kernels.emit.builder import F32, F64, I1, I32, I64, LANES, Builder, Value
from quire.kernels.emit.logit_edits import LogitEdits, banned
from quire.kernels.emit.logit_rows import VI64, LogitRow, added
from quire.kernels.emit.sampling_filters import Candidates, all_of

_LEAST_SHARE_BITS = 16
"""1 / 2^16 of the mass must be left: sampling from less would be too coarse."""


@dataclass(frozen=True)
class RunningMasses:
    """The masses of chunks of candidates, and of groups of 16 chunks, in scratch."""

    candidates: Candidates

    def weigh(self) -> Value:
        """Emit all masses; return their sum."""
        row, layout, b = self.candidates.row, self.candidates.row.layout, self.candidates.row.b
        with b.each(0, layout.count) as chunk:
            self._weigh_chunk(chunk.index)
        groups = layout.count // LANES
        with b.each(0, groups) as group:
            self._weigh_group(group.index)
        return row.fold(lambda part: b.load(layout.masses, part * 128, VI64, 64), groups, 0, I64, added)

    def weigh_again(self, token: Value) -> None:
        """Emit the masses of a token's chunk and group, after its logit has changed."""
        row, b = self.candidates.row, self.candidates.row.b
        chunk = row.wide(token) // (row.layout.vectors * LANES)
        with b.once():
            self._weigh_chunk(chunk)
        with b.once():
            self._weigh_group(chunk // LANES)

    def mass_around(self, token: Value) -> Value:
        """Return the mass of a token's chunk."""
        row = self.candidates.row
        chunk = row.wide(token) // (row.layout.vectors * LANES)
        return row.b.load(row.layout.masses, chunk * 8, I64)

    def _weigh_chunk(self, chunk: Value) -> None:
        row, b = self.candidates.row, self.candidates.row.b
        with b.loop(*row.vectors_of(chunk), state=[b.constant(0, VI64)]) as part:
            part.carry(self.candidates.masses(part.index) + part.state[0])
        b.store(b.fold_lanes(part.results[0], added), row.layout.masses, chunk * 8)

    def _weigh_group(self, group: Value) -> None:
        layout, b = self.candidates.row.layout, self.candidates.row.b
        masses = b.load(layout.masses, group * 128, VI64, 64)
        b.store(b.fold_lanes(masses, added), layout.groups, group * 8)

    def token_at(self, random: Value, total: Value) -> Value:
        """Return the token at this part, in [0, 1), of the total mass."""
        candidates, layout, b = self.candidates, self.candidates.row.layout, self.candidates.row.b
        place = b.convert("arith.fptoui", random * b.convert("arith.uitofp", total, F64), I64).min(total - 1).max(0)
        found, left = _pass(b, lambda i: b.load(layout.groups, i * 8, I64), 0, layout.count // LANES, place)
        first = found * LANES
        found, left = _pass(b, lambda i: b.load(layout.masses, i * 8, I64), first, first + LANES, left)
        vectors = candidates.row.vectors_of(found)
        found, left = _pass(b, lambda i: b.fold_lanes(candidates.masses(i), added), *vectors, left)
        masses, token = candidates.masses(found), found * LANES
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
    """Scratch for tokens that a mask does not allow, i32, and their logits, f32."""

    tokens: Value
    logits: Value


def first_allowed(row: LogitRow, most: Value, edits: LogitEdits, tries: Value, tried: TriedTokens) -> Value:
    """Return the first of `tries` samples from all tokens that the mask allows, or -1; `most` is the largest key.

    Each sample is one of the tokens that have not been tried; their logits are -inf meanwhile.
    """
    b = row.b
    scale, reach = (edits.field(at, F32) for at in (SampleRow.INVERSE_TEMPERATURE, SampleRow.REACH))
    masses, mask = RunningMasses(all_of(row, most, scale, reach)), edits.field(SampleRow.MASK)
    total = masses.weigh()
    least = total >> _LEAST_SHARE_BITS
    with b.loop(0, tries, state=[b.constant(-1, I32), total, b.index(0)]) as trial:
        allowed, left, count = trial.state
        goes_on = b.compare("slt", allowed, 0) & b.compare("ugt", left, least)
        with b.loop(0, row.wide(goes_on), state=trial.state) as once:
            random = b.load(edits.wanted, trial.index * 8 + SampleRow.RANDOMS, F64)
            token = masses.token_at(random, left)
            is_allowed = edits.masks.allows(mask, token)
            with b.loop(0, row.wide(b.compare("eq", is_allowed, 0)), state=[left, count]) as rejected:
                before = masses.mass_around(token)
                _reject(row, tried, token, count)
                masses.weigh_again(token)
                rejected.carry(left - (before - masses.mass_around(token)), count + 1)
            once.carry(b.select(is_allowed, token, b.constant(-1, I32)), *rejected.results)
        trial.carry(*once.results)
    _restore(row, tried, trial.results[2])
    return trial.results[0]


def _reject(row: LogitRow, tried: TriedTokens, token: Value, count: Value) -> None:
    """Ban a token, and note its logit as number `count`."""
    b, place = row.b, row.wide(token) * 4
    logit = b.load(row.logits, place, F32)
    with b.once():
        b.store(token, tried.tokens, count * 4)
        b.store(logit, tried.logits, count * 4)
        b.store(banned(b), row.logits, place)


def _restore(row: LogitRow, tried: TriedTokens, count: Value) -> None:
    """Give the first `count` of the tried tokens their logits back."""
    b = row.b
    with b.each_scalar(0, count) as each:
        token = row.wide(b.load(tried.tokens, each.index * 4, I32))
        b.store(b.load(tried.logits, each.index * 4, F32), row.logits, token * 4)
