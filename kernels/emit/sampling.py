"""Sampling from rows of logits, with the results of native/sampling/: all that is summed over the vocabulary is an
integer, so the order of sums does not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels._native import SampledRow, SampleRow
from quire.kernels.emit.builder import F32, F64, I1, I32, I64, LANES, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.emit.logit_rows import MOST, VI64, LogitRow, RowScratch, added
from quire.kernels.emit.sampling_filters import Bound, Candidates, candidates_of
from quire.kernels.emit.sampling_math import LEAST_KEY, MOST_KEY, order_key

_LEAST_REACH = -30.0  # e^-30 weighs nothing


@dataclass(frozen=True)
class SampleKernel(Kernel):
    """Samples from rows of logits as their SampleRow says.

    Buffers: logits f32 [m, vocabulary rounded up to 32], SampleRow [m], SampledRow [m]. Work items are rows.
    """

    vocabulary: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        logits, rows, results = b.buffer(0), b.buffer(1), b.buffer(2)
        layout = RowScratch.of(b, self.vocabulary)
        with b.items() as item:
            wanted = b.address(rows, item * SampleRow.BYTES)
            result = b.address(results, item * SampledRow.BYTES)
            row = b.address(logits, item * (round_up(self.vocabulary, BLOCK) * 4))
            with b.when(b.compare("ne", b.load(wanted, SampleRow.KIND, I32), SampleRow.NOTHING)):
                _sample(LogitRow(layout, row), wanted, result)


def _sample(row: LogitRow, wanted: Value, result: Value) -> None:
    """Emit all that the SampleRow at `wanted` asks for."""
    b = row.b
    kind = b.load(wanted, SampleRow.KIND, I32)
    most = row.find_maxima()
    likeliest = row.first_with(most)
    with b.loop(0, row.wide(b.compare("eq", kind, SampleRow.SAMPLE)), state=[likeliest]) as once:
        candidates = candidates_of(row, most, wanted)
        once.carry(_pick(candidates, b.load(wanted, SampleRow.RANDOM, F64)))
    is_report = b.compare("eq", kind, SampleRow.REPORT)
    token = b.select(is_report, b.load(wanted, SampleRow.TOKEN, I32), once.results[0])
    is_good = b.compare("slt", most, MOST_KEY) & b.compare("sgt", most, LEAST_KEY)
    with b.once():
        b.store(token, result, SampledRow.TOKEN)
        b.store(b.convert("arith.extui", is_good, I32), result, SampledRow.IS_GOOD)
    top = b.load(wanted, SampleRow.TOP, I32)
    with b.when(b.compare("sge", top, 0) & is_good):
        _report(row, token, most, top, result)


def _report(row: LogitRow, token: Value, most: Value, top: Value, result: Value) -> None:
    """Emit what log probabilities are made of: keys of logits, and the mass of all at temperature 1."""
    b = row.b
    bound = Bound(b.constant(LEAST_KEY, I32), b.constant(row.layout.size, I32))
    all_ = Candidates(row, most, b.constant(1.0, F32), b.constant(_LEAST_REACH, F32), bound)
    mass = row.sum_from(bound.key, all_.masses)
    key = order_key(b, b.load(row.logits, row.wide(token) * 4, F32))
    rank = row.rank(token, key)
    with b.once():
        b.store(mass, result, SampledRow.MASS)
        for value, field in ((most, SampledRow.MOST), (key, SampledRow.KEY), (rank, SampledRow.RANK)):
            b.store(value, result, field)
    with b.loop(0, row.wide(top), state=[b.constant(MOST, I32), b.constant(-1, I32)]) as place:
        best = row.next_likeliest(*place.state)
        with b.once():
            for value, field in zip(best, (SampledRow.TOP_KEYS, SampledRow.TOP_TOKENS), strict=True):
                b.store(value, result, place.index * 4 + field)
        place.carry(*best)


def _pick(candidates: Candidates, random: Value) -> Value:
    """Return the candidate at the random place in the running sum of masses, in order of tokens."""
    row, layout, b = candidates.row, candidates.row.layout, candidates.row.b
    with b.each(0, layout.count) as chunk:
        with b.loop(*row.vectors_of(chunk.index), state=[b.constant(0, VI64)]) as part:
            part.carry(candidates.masses(part.index) + part.state[0])
        b.store(b.fold_lanes(part.results[0], added), layout.masses, chunk.index * 8)
    groups = layout.count // LANES
    total = row.fold(lambda part: b.load(layout.masses, part * 128, VI64, 64), groups, 0, I64, added)
    place = b.convert("arith.fptoui", random * b.convert("arith.uitofp", total, F64), I64).min(total - 1).max(0)
    with b.each(0, groups) as group:
        masses = b.load(layout.masses, group.index * 128, VI64, 64)
        b.store(b.fold_lanes(masses, added), layout.groups, group.index * 8)
    found, left = _pass(b, lambda i: b.load(layout.groups, i * 8, I64), 0, groups, place)
    first = found * LANES
    found, left = _pass(b, lambda i: b.load(layout.masses, i * 8, I64), first, first + LANES, left)
    found, left = _pass(b, lambda i: b.fold_lanes(candidates.masses(i), added), *row.vectors_of(found), left)
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
