"""Layers whose state is a matrix for each head, which every token decays and adds to: gated delta rule, Mamba 2.

Tokens are taken one by one, in prompts too. The state then has the same bits whatever the chunks, and it costs little:
of a model of Qwen3.5-0.8B's shape 4 % of the multiplications of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels.attention_heads import StateHeads
from quire.kernels.emit.builder import F32, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.emit.math import exp, rsqrt, sigmoid, softplus
from quire.kernels.emit.state_entries import EntryStates

Update = Callable[[Value, Value], Value]
"""What a row of the matrix becomes, given the row and its key."""

CHAINS = 4
"""Chains of a sum: of the rows 0, 4, 8, ..., of 1, 5, 9, ..., and so on, which are added in pairs."""

_UNROLLED = 8


def state_bytes(heads: StateHeads) -> int:
    """Return the bytes of a layer's state: f32 [values][value / 16][key][16]."""
    return heads.values * heads.key * heads.value * 4


@dataclass(frozen=True)
class UnitHeadsKernel(Kernel):
    """Divides heads by their length, x / sqrt(sum x^2 + epsilon), the first ones times `scale`; in place.

    Work items are tokens times heads, of which the first half are queries, and the others keys. Buffers: rows f32 of
    `columns` columns that begin with the heads.
    """

    heads: StateHeads
    columns: int
    scale: float
    epsilon: float

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        h = self.heads
        rows = b.buffer(0)
        with b.items() as item:
            token, number = item // (2 * h.keys), item % (2 * h.keys)
            head = b.address(rows, token * (round_up(self.columns, BLOCK) * 4) + number * (h.key * 4))
            with b.loop(0, h.key // 16, state=[b.constant(0.0, VF32)]) as part:
                value = b.load(head, part.index * 64, VF32, 64)
                part.carry(b.fma(value, value, part.state[0]))
            factor = rsqrt(b, b.fold_lanes(part.results[0], lambda left, right: left + right) + self.epsilon)
            both = b.broadcast(b.select(b.compare("slt", number, h.keys), factor * self.scale, factor))
            with b.loop(0, h.key // 16) as part:
                b.store(b.load(head, part.index * 64, VF32, 64) * both, head, part.index * 64, 64)


@dataclass(frozen=True)
class StateRatesKernel(Kernel):
    """Decay and step of each value head: exp(rate * t) with t = softplus(scale * a + bias), and sigmoid(b) or t.

    Work items are tokens. Buffers: rows f32 of `columns` columns that have a from column `first` on, with `steps` such
    rows that have b, f32 [values] of the rates, which are below 0, and of the biases, and out f32
    [m][values rounded up to 16][2].

    With `group` both are in the same rows: for each `group` heads their b, then their a. Without `steps` the step is t,
    at least `least` and, unless it is 0, at most `most`, in the decay too.
    """

    values: int
    columns: int
    first: int = 0
    group: int = 0
    steps: bool = False
    scale: float = 1.0
    least: float = 0.0
    most: float = 0.0

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        padded = round_up(self.values, 16)
        count = 2 if self.steps else 1
        sources = [b.buffer(number) for number in range(count)]
        rates, biases, out = (b.buffer(count + i) for i in range(3))
        gathered = [b.scratch(padded * 4) for _ in sources]
        for scratch in gathered:
            with b.each(0, padded // 16) as part:
                b.store(b.constant(0.0, VF32), scratch, part.index * 64, 64)
        with b.items() as token:
            with b.each_scalar(0, self.values) as head:
                for number, (source, scratch) in enumerate(zip(sources, gathered, strict=True)):
                    row = b.address(source, token * (round_up(self.columns, BLOCK) * 4) + self.first * 4)
                    b.store(b.load(row, self._column(head.index, number) * 4, F32), scratch, head.index * 4)
            with b.each(0, padded // 16) as part:
                at = part.index * 64
                time = b.load(gathered[0], at, VF32, 64)
                time = softplus(b, (time if self.scale == 1 else time * self.scale) + b.load(biases, at, VF32, 64))
                if self.steps:
                    step = sigmoid(b, b.load(gathered[1], at, VF32, 64))
                else:
                    step = time = time.max(self.least).min(self.most) if self.most else time.max(self.least)
                decay = exp(b, time * b.load(rates, at, VF32, 64))
                target = b.address(out, token * (padded * 8) + at * 2)
                pairs = [b.shuffle(decay, step, [n for i in range(8) for n in (i + o, i + o + 16)]) for o in (0, 8)]
                for number, pair in enumerate(pairs):
                    b.store(pair, target, number * 64, 64)

    def _column(self, head: Value, source: int) -> Value:
        """Return the column of a head's a, or of its b in source 1."""
        if not self.group:
            return head
        return head // self.group * (2 * self.group) + head % self.group + (0 if source else self.group)


@dataclass(frozen=True)
class StateUpdateKernel(Kernel):
    """Updates the state S [key, value] of each value head by each token's key k and value v; the output is o = q S.

    `delta`: S = S' + k (step * (v - k S'))^T, otherwise S = S' + k (step * v)^T, with S' = decay * S, and with `skip` o
    has skip * v added. Sums over keys run in four chains, of rows 0, 4, 8 and so on, which are added in pairs.

    Work items are state entries times value heads times 16 of their elements. Buffers: state entries, their writes,
    rows f32 of `columns` columns that have queries, keys and values from the columns `queries`, `keys` and `values` on,
    decays and steps (StateRatesKernel), the layer's state (`state_bytes`), o f32 [m, value columns rounded up to 32],
    and with `skip` f32 [value heads].
    """

    heads: StateHeads
    columns: int
    queries: int
    keys: int
    values: int
    delta: bool = False
    skip: bool = False

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        h = self.heads
        entries, writes, rows, rates, state, out = (b.buffer(i) for i in range(6))
        blocks, block_bytes = h.value // 16, h.key * 64
        matrix = b.scratch(block_bytes)
        with b.items() as item:
            states = EntryStates.of(b, item // (h.values * blocks), entries, writes, state)
            block = item % (h.values * blocks)
            head, at = block // blocks, block * block_bytes
            with b.loop(0, h.key) as key:
                b.store(states.load(b, at + key.index * 64), matrix, key.index * 64, 64)

            def store(record: Value, _: Sequence[Value], at: Value = at) -> None:
                with b.loop(0, h.key) as key:
                    b.store(b.load(matrix, key.index * 64, VF32, 64), record, at + key.index * 64, 64)

            with states.tokens(b, [], store) as token:
                row = b.address(rows, token.index * (round_up(self.columns, BLOCK) * 4))
                key_at = (head % h.keys if h.interleaved else head // h.group) * (h.key * 4)
                query, key_row = (b.address(row, key_at + first * 4) for first in (self.queries, self.keys))
                value = b.load(row, block * 64 + self.values * 4, VF32, 64)
                pair = b.address(rates, (token.index * round_up(h.values, 16) + head) * 8)
                decay, step = (b.broadcast(b.load(pair, 4 * i, F32)) for i in range(2))
                if self.delta:
                    value = value - self._pass(b, matrix, lambda row, _: row * decay, key_row, key_row)
                    result = self._pass(b, matrix, self._adding(b, value * step), key_row, query)
                else:
                    added = self._adding(b, value * step)
                    result = self._pass(b, matrix, lambda row, key: added(row * decay, key), key_row, query)
                if self.skip:
                    result = b.fma(value, b.broadcast(b.load(b.buffer(6), head * 4, F32)), result)
                b.store(result, out, token.index * (round_up(h.value_columns, BLOCK) * 4) + block * 64, 64)

    @staticmethod
    def _adding(b: Builder, added: Value) -> Update:
        return lambda row, key: b.fma(key, added, row)

    def _pass(self, b: Builder, matrix: Value, update: Update, keys: Value, factors: Value) -> Value:
        """Update every row of the matrix, given the row and its key; return the sum of the rows times their factors."""
        unrolled = min(_UNROLLED, self.heads.key)
        zero = b.constant(0.0, VF32)
        with b.loop(0, self.heads.key, unrolled, state=[zero] * CHAINS) as loop:
            sums = list(loop.state)
            for i in range(unrolled):
                number = loop.index + i
                key = b.broadcast(b.load(keys, number * 4, F32))
                factor = key if factors is keys else b.broadcast(b.load(factors, number * 4, F32))
                row = update(b.load(matrix, number * 64, VF32, 64), key)
                b.store(row, matrix, number * 64, 64)
                sums[i % CHAINS] = b.fma(row, factor, sums[i % CHAINS])
            loop.carry(*sums)
        first, second, third, fourth = loop.results
        return (first + second) + (third + fourth)
