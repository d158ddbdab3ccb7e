"""Edits of a row of logits before sampling: masks, bans, biases and penalties, as in the host's SamplingState."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels._native import MASK_BITS, LogitEdit, SampleRow
from quire.kernels.emit.builder import F32, I32, I64, LANES, Builder, Value
from quire.kernels.emit.logit_rows import LogitRow
from quire.kernels.emit.sampling_math import LEAST_KEY

_BANNED_BITS = -0x800000  # those of -inf
_MOST = 3.4028234663852886e38
"""The largest finite f32, which takes the place of an overflow."""


def banned(b: Builder) -> Value:
    """Return the logit of a token that must not be sampled, -inf."""
    return b.constant(_BANNED_BITS, I32).bitcast(F32)


@dataclass(frozen=True)
class RowMasks:
    """Masks of tokens, of `words` words each, at address `memory`; a SampleRow names one by its number, from 1."""

    memory: Value
    words: int

    def address(self, number: Value) -> Value:
        """Return the address of a mask; that of the first one for number 0, which is none."""
        b = number.builder
        return b.address(self.memory, b.convert("arith.extui", number.max(1) - 1, I64) * (self.words * 4))


@dataclass(frozen=True)
class LogitEdits:
    """The edits that the SampleRow at `wanted` asks for."""

    wanted: Value
    edits: Value
    masks: RowMasks

    def field(self, offset: int, type_: str = I32) -> Value:
        """Return a field of the SampleRow."""
        return self.wanted.builder.load(self.wanted, offset, type_)

    def are_any(self) -> Value:
        """Return whether a logit may change."""
        b = self.wanted.builder
        return b.compare("ne", self.field(SampleRow.EDITED) | self.field(SampleRow.MASK), 0)

    def apply(self, raw: LogitRow, changed: LogitRow) -> Value:
        """Emit changed logits; return the largest key. Where the edits ban all that the mask allows, it alone
        counts."""
        b, mask = raw.b, self.field(SampleRow.MASK)
        self._copy(raw, changed, [mask, self.field(SampleRow.LIMIT)])
        self._edit(changed)
        most = changed.find_maxima()
        masked, edited = (b.compare("ne", field, 0) for field in (mask, self.field(SampleRow.EDITED)))
        with b.loop(0, raw.wide(masked & edited & b.compare("sle", most, LEAST_KEY)), state=[most]) as once:
            self._copy(raw, changed, [mask])
            once.carry(changed.find_maxima())
        return once.results[0]

    def _copy(self, raw: LogitRow, changed: LogitRow, masks: Sequence[Value]) -> None:
        """Copy the logits of the tokens that all masks allow, and ban the others."""
        b, none = raw.b, raw.b.broadcast(banned(raw.b))
        bits = [(self.masks.address(number), b.compare("eq", number, 0)) for number in masks]
        with b.each(0, raw.num_vectors) as part:
            values, first = raw.values(part.index), part.index * LANES
            for memory, is_none in bits:
                word = b.load(memory, first // MASK_BITS * 4, I32)
                word = word >> b.convert("arith.trunci", first % MASK_BITS, I32)
                word = b.select(is_none, b.constant(-1, I32), word)
                lanes = b.op("arith.shrui", [b.broadcast(word), b.lane_numbers()], b.lane_numbers().type)
                values = b.select(b.compare("ne", lanes & 1, 0), values, none)
            b.store(values, changed.logits, part.index * 64, 64)

    def _edit(self, changed: LogitRow) -> None:
        """Emit bans, biases and penalties, in this order."""
        b, ban = changed.b, banned(changed.b)
        repetition, presence = (
            self.field(offset, F32) for offset in (SampleRow.REPETITION_PENALTY, SampleRow.PRESENCE_PENALTY)
        )

        def repeated(logit: Value) -> Value:
            return _finite(b.select(b.compare("ogt", logit, 0.0), logit / repetition, logit * repetition))

        def generated(logit: Value, loss: Value) -> Value:
            return _finite(_finite(repeated(logit) - loss) - presence)

        kinds: list[tuple[int, Callable[[Value, Value], Value]]] = [
            (SampleRow.BANNED, lambda _logit, _amount: ban),
            (SampleRow.BIASED, lambda logit, bias: _finite(logit + bias)),
            (SampleRow.PROMPTED, lambda logit, _amount: repeated(logit)),
            (SampleRow.GENERATED, generated),
        ]
        first = changed.wide(self.field(SampleRow.FIRST_EDIT))
        for field, edit in kinds:
            end = first + changed.wide(self.field(field))
            with b.each_scalar(first, end) as each:
                at = b.address(self.edits, each.index * LogitEdit.BYTES)
                place = changed.wide(b.load(at, LogitEdit.TOKEN, I32)) * 4
                logit, amount = b.load(changed.logits, place, F32), b.load(at, LogitEdit.AMOUNT, F32)
                is_banned = b.compare("oeq", logit, ban)
                b.store(b.select(is_banned, logit, edit(logit, amount)), changed.logits, place)
            first = end


def _finite(logit: Value) -> Value:
    """Return the logit, or the largest finite number of its sign for an infinity."""
    return logit.max(-_MOST).min(_MOST)
