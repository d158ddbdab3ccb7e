"""Kernels of mixtures of experts: routing, grouping of tokens by expert, products by groups, weighted sums.

An *assignment* is a token and one of the `top_k` experts that it is routed to; there are tokens * top_k, in the order
of tokens, then of scores. Grouped rows hold the assignments of one expert after the other, each expert's from a
multiple of 16 rows on, so that they are panels of packed activations. `slots`, i32, gives the grouped row of each
assignment.

The list of entries is a count, i64, and that many of three i64: an expert, its first grouped row, and the number of
rows, at most `rows_per_item`. Every row is computed by itself and each token's sum has a fixed order, so neither
grouping nor entries change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.kernels.emit.builder import F32, I32, I64, VF32, VI32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.gemm import GemmItem, GemmKernel, GemmOutput
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, packed_offset, round_up
from quire.kernels.emit.math import exp, sigmoid

ENTRY_BYTES = 24
"""Bytes of an entry; the count before them has 8."""
LOWEST = -3.4028234663852886e38
"""The score of an expert that is no candidate."""
_NONE = 2**31 - 1
_SMALLEST_SUM = 1e-20  # that DeepSeek-V3 adds to sums of sigmoids


@dataclass(frozen=True)
class RouteKernel(Kernel):
    """Chooses the experts of a row and their weights, as `graph.operations.ExpertRouter` describes.

    Work items are rows. Buffers: the router's outputs f32 [m, experts rounded up to 32], the chosen experts i32
    [m, top_k], their weights f32 [m, top_k], and with `correction` and `expert_scales` those tensors, f32 padded to a
    multiple of 32.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    correction: bool
    normalize: bool
    scale: float
    groups: int
    top_groups: int
    group_score: Literal["max", "top2"]
    least_sum: float = 0.0
    expert_scales: bool = False

    @property
    def shape(self) -> str:
        """See Kernel."""
        return f"{self.top_k} of {self.experts}"

    @property
    def _parts(self) -> int:
        return -(-self.experts // TILE_ROWS)

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        outputs, numbers, weights = (b.buffer(i) for i in range(3))
        correction = b.buffer(3) if self.correction else None
        expert_scales = b.buffer(3 + self.correction) if self.expert_scales else None
        scores, choice = b.scratch(self._parts * 64), b.scratch(self._parts * 64)
        with b.items() as row:
            source = b.address(outputs, row * (round_up(self.experts, BLOCK) * 4))
            total = self._score(b, source, scores)
            self._candidates(b, source, scores, total, correction, choice)
            if self.groups > 1:
                self._drop_groups(b, choice)
            at = row * (self.top_k * 4)
            chosen, their_weights = b.address(numbers, at), b.address(weights, at)
            with b.once():
                of_chosen = self._choose(b, choice, scores, chosen, their_weights)
                divisor = self._normalizer(b, of_chosen, total) if self.normalize else total
                self._weigh(b, chosen, their_weights, divisor, expert_scales)

    def _weigh(
        self, b: Builder, numbers: Value, weights: Value, divisor: Value | None, expert_scales: Value | None
    ) -> None:
        """Make the weights of the chosen experts of their scores."""
        with b.loop(0, self.top_k) as rank:
            place = b.address(weights, rank.index * 4)
            weight = b.load(place, 0, F32)
            weight = weight / divisor if divisor is not None else weight
            if expert_scales is not None:
                weight = weight * b.load(expert_scales, b.load_index(numbers, rank.index) * 4, F32)
            b.store(weight * self.scale if self.scale != 1 else weight, place, 0)

    def _masked(self, b: Builder, part: Value, value: Value, other: float) -> Value:
        """Return 16 lanes of experts, with `other` in those past the last expert."""
        return b.select(b.compare("slt", self._experts_of(b, part), self.experts), value, b.constant(other, value.type))

    @staticmethod
    def _experts_of(b: Builder, part: Value) -> Value:
        return b.broadcast(b.convert("arith.trunci", part * TILE_ROWS, I32)) + b.lane_numbers()

    def _score(self, b: Builder, outputs: Value, scores: Value) -> Value | None:
        """Store the scores of all experts; of a softmax without its denominator, which is returned."""
        if self.scoring == "sigmoid":
            with b.each(0, self._parts) as part:
                b.store(sigmoid(b, b.load(outputs, part.index * 64, VF32, 64)), scores, part.index * 64, 64)
            return None
        with b.loop(0, self._parts, state=[b.constant(LOWEST, VF32)]) as part:
            value = self._masked(b, part.index, b.load(outputs, part.index * 64, VF32, 64), LOWEST)
            part.carry(value.max(part.state[0]))
        largest = b.broadcast(b.fold_lanes(part.results[0], lambda left, right: left.max(right)))
        with b.each(0, self._parts) as part:
            value = exp(b, b.load(outputs, part.index * 64, VF32, 64) - largest)
            b.store(self._masked(b, part.index, value, 0.0), scores, part.index * 64, 64)
        with b.loop(0, self._parts, state=[b.constant(0.0, VF32)]) as part:
            part.carry(part.state[0] + b.load(scores, part.index * 64, VF32, 64))
        return b.fold_lanes(part.results[0], lambda left, right: left + right)

    def _normalizer(self, b: Builder, chosen: Value, total: Value | None) -> Value:
        """Return the divisor of the weights, where `chosen` is the sum of scores and `total` their denominator."""
        if total is None:
            return chosen + _SMALLEST_SUM
        return chosen.max(total * self.least_sum) if self.least_sum else chosen

    def _candidates(
        self, b: Builder, outputs: Value, scores: Value, total: Value | None, correction: Value | None, choice: Value
    ) -> None:
        """Store what experts are chosen by: scores, or the router's outputs if these have the same order.

        Only where a correction is added, scores of a softmax need their denominator `total`.

        Outputs that differ may have equal scores, once these are rounded.
        """
        by_score = correction is not None or (self.groups > 1 and self.group_score == "top2")
        with b.each(0, self._parts) as part:
            value = b.load(scores if by_score else outputs, part.index * 64, VF32, 64)
            if correction is not None and total is not None:
                value = value / b.broadcast(total)
            if correction is not None:
                value = value + b.load(correction, part.index * 64, VF32, 64)
            b.store(self._masked(b, part.index, value, LOWEST), choice, part.index * 64, 64)

    def _drop_groups(self, b: Builder, choice: Value) -> None:
        """Give the experts of all groups but the best ones the lowest score."""
        size = self.experts // self.groups
        ranking, dropped = b.scratch(self.groups * 4), b.scratch(self.groups * 4)
        lowest = b.constant(LOWEST, F32)
        with b.each_scalar(0, self.groups) as group:
            with b.loop(0, size, state=[lowest, lowest]) as member:
                value = b.load(choice, (group.index * size + member.index) * 4, F32)
                first, second = member.state
                member.carry(value.max(first), value.min(first).max(second))
            first, second = member.results
            b.store(first + second if self.group_score == "top2" else first, ranking, group.index * 4)
            b.store(b.constant(1, I32), dropped, group.index * 4)
        with b.once(), b.loop(0, self.top_groups):
            with b.loop(0, self.groups, state=[b.constant(LOWEST, F32), b.index(0)]) as group:
                value = b.load(ranking, group.index * 4, F32)
                better = group.state[0] < value
                group.carry(b.select(better, value, group.state[0]), b.select(better, group.index, group.state[1]))
            b.store(lowest, ranking, group.results[1] * 4)
            b.store(b.constant(0, I32), dropped, group.results[1] * 4)
        with b.each_scalar(0, self.groups) as group:
            is_dropped = b.compare("ne", b.load(dropped, group.index * 4, I32), 0)
            with b.when(is_dropped), b.loop(0, size) as member:
                b.store(lowest, choice, (group.index * size + member.index) * 4)

    def _choose(self, b: Builder, choice: Value, scores: Value, numbers: Value, weights: Value) -> Value:
        """Store the best experts and their scores in order, and return the sum of these."""
        with b.loop(0, self.top_k, state=[b.constant(0.0, F32)]) as rank:
            with b.loop(0, self._parts, state=[b.constant(LOWEST, VF32)]) as part:
                part.carry(b.load(choice, part.index * 64, VF32, 64).max(part.state[0]))
            best = b.broadcast(b.fold_lanes(part.results[0], lambda left, right: left.max(right)))
            with b.loop(0, self._parts, state=[b.constant(_NONE, VI32)]) as part:
                found = b.compare("oeq", b.load(choice, part.index * 64, VF32, 64), best)
                part.carry(b.select(found, self._experts_of(b, part.index), _NONE).min(part.state[0]))
            # Of a row of NaN none is the best, and its weights are NaN.
            number = b.fold_lanes(part.results[0], lambda left, right: left.min(right)).min(self.experts - 1)
            b.store(number, numbers, rank.index * 4)
            at = b.convert("arith.extui", number, I64) * 4
            b.store(b.constant(LOWEST, F32), choice, at)
            score = b.load(scores, at, F32)
            b.store(score, weights, rank.index * 4)
            rank.carry(rank.state[0] + score)
        return rank.results[0]


@dataclass(frozen=True)
class GroupKernel(Kernel):
    """Groups the step's assignments by expert; a single work item.

    Buffers: the chosen experts i32 [tokens, top_k], slots, and the list of entries.
    """

    experts: int
    top_k: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        size = context.rows_per_item
        numbers, slots, entries = (b.buffer(i) for i in range(3))
        assignments = b.dim("tokens") * self.top_k
        counts = b.scratch(self.experts * 8)
        zero, one = b.index(0), b.index(1)
        with b.items():
            with b.loop(0, self.experts) as expert:
                b.store(zero, counts, expert.index * 8)
            with b.loop(0, assignments) as assignment:
                at = b.load_index(numbers, assignment.index) * 8
                count = b.load(counts, at, I64)
                b.store(b.convert("arith.trunci", count, I32), slots, assignment.index * 4)
                b.store(count + one, counts, at)
            with b.loop(0, self.experts, state=[zero, zero]) as expert:
                row, place = expert.state
                count = b.load(counts, expert.index * 8, I64)
                with b.loop(0, count, size, state=[place]) as start:
                    entry = b.address(entries, start.state[0] * ENTRY_BYTES + 8)
                    fields = (expert.index, row + start.index, (count - start.index).min(size))
                    for i, field in enumerate(fields):
                        b.store(field, entry, 8 * i)
                    start.carry(start.state[0] + one)
                b.store(row, counts, expert.index * 8)
                expert.carry(row + (count + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS, start.results[0])
            b.store(expert.results[1], entries, 0)
            with b.loop(0, assignments) as assignment:
                first = b.load(counts, b.load_index(numbers, assignment.index) * 8, I64)
                slot = b.load_index(slots, assignment.index) + first
                b.store(b.convert("arith.trunci", slot, I32), slots, assignment.index * 4)


@dataclass(frozen=True)
class ScatterKernel(Kernel):
    """Copies each token's packed activations of `width` columns to the grouped rows of its assignments.

    Work items are assignments. Buffers: x, out, slots.
    """

    width: int
    top_k: int

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes = context.dtypes
        x, out, slots = (b.buffer(i) for i in range(3))
        with b.items() as item:
            rows = item // self.top_k, b.load_index(slots, item)
            source, target = (
                b.address(base, packed_offset(dtypes, self.width, row, b.index(0)))
                for base, row in zip((x, out), rows, strict=True)
            )
            with b.each(0, round_up(self.width, BLOCK) // BLOCK) as block:
                at = block.index * (TILE_ROWS * BLOCK * dtypes.activation_bytes)
                for offset in range(0, BLOCK * dtypes.activation_bytes, 64):
                    b.store(b.load(source, at + offset, VI32, 64), target, at + offset, 64)


@dataclass(frozen=True)
class ExpertGemmKernel(GemmKernel):
    """GEMM of grouped rows, each entry's by the weights of its expert; `n` are the columns of one expert.

    Work items are entries times blocks of 32 columns, those of an entry one after the other; items of entries past the
    last do nothing. Buffers: x (grouped rows), w (the packed experts, each of n rounded up to 32 columns), y (grouped
    rows), the f32 biases of all experts in the same order if `bias`, and the list of entries. With `adapter_tiles` the
    last buffers are the numbers that ExpertShrinkKernel writes (expert_adapters.py), its table, and the short vectors.
    """

    experts: int = 0
    top_k: int = 0

    def operations(self, rows: int, pairs: int) -> int:
        """See Kernel."""
        return 2 * self.k * self.n * rows * self.top_k

    def active(self, rows: int) -> float:
        """Return the expected number of experts that `rows` tokens are routed to, if all are chosen equally often."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)

    @property
    def shape(self) -> str:
        """See Kernel."""
        return f"{self.top_k} of {self.experts} x {self.k} x {self.n}"

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        x, w, y = (b.buffer(i) for i in range(3))
        biases = b.buffer(3) if self.bias else None
        entries = b.buffer(3 + self.bias)
        adapters = self._adapters(b, 4 + self.bias) if self.adapter_tiles else None
        blocks = self._blocks
        with b.items() as item:
            number, block = item // blocks, item % blocks
            count = b.load(entries, 0, I64)
            with b.when(number < count):
                entry = b.address(entries, number * ENTRY_BYTES + 8)
                expert, first, rows = (b.load(entry, 8 * i, I64) for i in range(3))
                bias = None if biases is None else b.address(biases, expert * (blocks * BLOCK * 4))
                output = GemmOutput(y, bias, adapters=adapters)
                weights = b.address(w, expert * (blocks * self._block_bytes(context.dtypes)))
                if adapters is not None:
                    adapters.prefetch(b, context.dtypes, first, rows, block)
                sink = self._sink(b, context, output, first)
                part = GemmItem(first // TILE_ROWS, rows, block, blocks, count * blocks)
                self._multiply(b, context, x, weights, part, sink)


@dataclass(frozen=True)
class CombineKernel(Kernel):
    """Adds up the outputs of a token's experts: `sum = fma(weight, y, sum)` in the order of its assignments.

    Work items are tokens. Buffers: y f32 (grouped rows of width rounded up to 32), slots, weights f32 [tokens, top_k],
    out f32 rows, and with `shared` the outputs of the shared expert, f32 rows, and those of its gate, f32 [tokens, 32],
    whose sigmoid scales them; they are added last. Out is `scale * sum`, or that is added to it if `add`.
    """

    width: int
    top_k: int
    scale: float = 1.0
    add: bool = True
    shared: bool = False

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        row_bytes = round_up(self.width, BLOCK) * 4
        y, slots, weights, out = (b.buffer(i) for i in range(4))
        with b.items() as token:
            terms = []
            for rank in range(self.top_k):
                number = token * self.top_k + rank
                row = b.address(y, b.load_index(slots, number) * row_bytes)
                terms.append((b.broadcast(b.load(weights, number * 4, F32)), row))
            if self.shared:
                gate = sigmoid(b, b.broadcast(b.load(b.buffer(5), token * (BLOCK * 4), F32)))
                terms.append((gate, b.address(b.buffer(4), token * row_bytes)))
            target = b.address(out, token * row_bytes)
            with b.each(0, self.width // 16) as part:
                self._add_up(b, terms, target, part.index * 64)

    def _add_up(self, b: Builder, terms: Sequence[tuple[Value, Value]], target: Value, at: Value) -> None:
        total = b.constant(0.0, VF32)
        for weight, row in terms:
            total = b.fma(weight, b.load(row, at, VF32, 64), total)
        total = total * self.scale if self.scale != 1 else total
        b.store(total + b.load(target, at, VF32, 64) if self.add else total, target, at, 64)
