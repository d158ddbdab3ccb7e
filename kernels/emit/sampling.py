"""Sampling from rows of logits, with the results of native/sampling/: all that is summed over the vocabulary is an
integer, so the order of sums does not matter."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels._native import MASK_BITS, LikelyToken, SampledRow, SampleRow
from quire.kernels.emit.builder import F32, F64, I32, I64, LANES, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.emit.logit_edits import LogitEdits, RowMasks, banned
from quire.kernels.emit.logit_rows import MOST, LogitRow, RowScratch
from quire.kernels.emit.running_masses import RunningMasses, TriedTokens, try_likeliest, try_samples
from quire.kernels.emit.sampling_filters import Candidates, all_of, candidates_of
from quire.kernels.emit.sampling_math import LEAST_KEY, MOST_KEY, order_key

_LEAST_REACH = -30.0  # e^-30 weighs nothing


@dataclass(frozen=True)
class SampleKernel(Kernel):
    """Samples from rows of logits as their SampleRow says.

    Buffers: logits f32 [m, vocabulary rounded up to 32], SampleRows, SampledRows, the LogitEdits and the masks of all
    rows, and rows like those of logits for changed ones, or for LikelyTokens. Work items are SampleRows, each of which
    names its row.
    """

    vocabulary: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        logits, rows, results, edits, memory, changed = (b.buffer(i) for i in range(6))
        layout, masks = RowScratch.of(b, self.vocabulary), RowMasks(memory, -(-self.vocabulary // MASK_BITS))
        tried = TriedTokens(*(b.scratch(SampleRow.MOST_TRIES * 4) for _ in range(2)))
        size = round_up(self.vocabulary, BLOCK) * 4
        with b.items() as item:
            asked = b.address(rows, item * SampleRow.BYTES)
            result = b.address(results, item * SampledRow.BYTES)
            with b.when(b.compare("ne", b.load(asked, SampleRow.KIND, I32), SampleRow.NOTHING)):
                wanted = b.staged(asked, SampleRow.BYTES)  # a GPU reads it from the host's memory
                start = b.load_index(b.address(wanted, SampleRow.ROW), b.index(0)) * size
                raw, own = (LogitRow(layout, b.address(base, start)) for base in (logits, changed))
                _sample(raw, own, LogitEdits(wanted, edits, masks), tried, result)


def _sample(raw: LogitRow, changed: LogitRow, edits: LogitEdits, tried: TriedTokens, result: Value) -> None:
    """Emit all that a SampleRow asks for."""
    b, wanted = raw.b, edits.wanted
    kind, are_edited = edits.field(SampleRow.KIND), edits.are_any()
    most = raw.find_maxima()
    with b.loop(0, raw.wide(are_edited), state=[most]) as once:
        once.carry(edits.apply(raw, changed))
    left = once.results[0]  # the largest key of what is sampled from
    row = LogitRow(raw.layout, b.select(are_edited, changed.logits, raw.logits))
    likeliest, tries = row.first_with(left), raw.wide(edits.field(SampleRow.TRIES))
    is_sampled, is_tried = b.compare("eq", kind, SampleRow.SAMPLE), b.compare("ne", tries, 0)
    with b.loop(0, row.wide(is_sampled & b.compare("eq", tries, 0)), state=[likeliest]) as once:
        once.carry(_pick(candidates_of(row, left, wanted), b.load(wanted, SampleRow.RANDOMS, F64)))
    with b.loop(0, row.wide(is_sampled & is_tried), state=[once.results[0]]) as trial:
        trial.carry(try_samples(raw, most, wanted, tries, tried, result))
    with b.when(is_tried & b.compare("eq", kind, SampleRow.LIKELIEST)):
        try_likeliest(raw, tries, result)
    is_report = b.compare("eq", kind, SampleRow.REPORT)
    token = b.select(is_report, edits.field(SampleRow.TOKEN), trial.results[0])
    has_left = b.compare("sgt", left, LEAST_KEY)
    is_good = has_left & b.compare("slt", most, MOST_KEY)
    with b.once():
        b.store(b.select(has_left, token, b.constant(-1, I32)), result, SampledRow.TOKEN)
        b.store(b.convert("arith.extui", is_good, I32), result, SampledRow.IS_GOOD)
    with b.when(b.compare("sge", most, MOST_KEY)):
        _name_bad(raw, result)
    top = edits.field(SampleRow.TOP)
    with b.when(b.compare("sge", top, 0) & is_good):
        with b.when(are_edited | is_tried):
            raw.find_maxima()
        _report(raw, token, most, top, result)
        with b.when(b.compare("sgt", top, SampleRow.MOST_TOP)):
            _list_likeliest(raw, most, top, changed.logits)


def _name_bad(row: LogitRow, result: Value) -> None:
    """Emit the first token whose logit is NaN or infinite, and its key."""
    b, token = row.b, row.first_from(MOST_KEY)
    key = order_key(b, b.load(row.logits, row.wide(token) * 4, F32))
    with b.once():
        b.store(token, result, SampledRow.TOKEN)
        b.store(key, result, SampledRow.KEY)


def _report(row: LogitRow, token: Value, most: Value, top: Value, result: Value) -> None:
    """Emit what log probabilities are made of: keys of logits, and the mass of all at temperature 1."""
    b = row.b
    all_ = all_of(row, most, b.constant(1.0, F32), b.constant(_LEAST_REACH, F32))
    mass = row.sum_from(all_.bound.key, all_.masses)
    key = order_key(b, b.load(row.logits, row.wide(token) * 4, F32))
    rank = row.rank(token, key)
    with b.once():
        b.store(mass, result, SampledRow.MASS)
        for value, field in ((most, SampledRow.MOST), (key, SampledRow.KEY), (rank, SampledRow.RANK)):
            b.store(value, result, field)
    count = b.select(b.compare("sle", top, SampleRow.MOST_TOP), top, b.constant(0, I32))
    with b.loop(0, row.wide(count), state=[b.constant(MOST, I32), b.constant(-1, I32)]) as place:
        best = row.next_likeliest(*place.state)
        with b.once():
            for value, field in zip(best, (SampledRow.TOP_KEYS, SampledRow.TOP_TOKENS), strict=True):
                b.store(value, result, place.index * 4 + field)
        place.carry(*best)


def _list_likeliest(row: LogitRow, most: Value, top: Value, memory: Value) -> None:
    """Emit the `top` likeliest tokens and their keys, ordered by number."""
    b, layout, size = row.b, row.layout, row.layout.vectors * LANES
    likeliest = all_of(row, most, b.constant(1.0, F32), banned(b)).likeliest(row.wide(top))
    counts = RunningMasses(row, likeliest.ones)
    counts.weigh()
    with b.each_scalar(0, layout.count) as chunk:
        first = chunk.index * size
        is_empty = b.compare("eq", b.load(layout.masses, chunk.index * 8, I64), 0)
        stop = b.select(is_empty, first, (first + size).min(layout.size))
        with b.loop(first, stop, state=[counts.before(chunk.index)]) as each:
            token, place = b.convert("arith.trunci", each.index, I32), each.state[0]
            key = order_key(b, b.load(row.logits, each.index * 4, F32))
            is_listed = likeliest.bound.holds(key, token)
            with b.when(is_listed):
                at = b.address(memory, place * LikelyToken.BYTES)
                b.store(token, at, LikelyToken.TOKEN)
                b.store(key, at, LikelyToken.KEY)
            each.carry(place + row.wide(is_listed))


def _pick(candidates: Candidates, random: Value) -> Value:
    """Return the candidate at the random place in the running sum of masses, in order of tokens."""
    masses = RunningMasses(candidates.row, candidates.masses)
    return masses.token_at(random, masses.weigh())
