"""State updates by a block of threads: see StateUpdateKernel, and emit/state_update.py for the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels._native import StateEntry
from quire.kernels.emit.builder import F32, I64, LANES, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.emit.state_entries import EntryStates
from quire.kernels.emit.state_update import CHAINS, StateUpdateKernel, Update

STATE_THREADS = CHAINS * LANES
"""Threads of a block."""


@dataclass(frozen=True)
class _LoadedToken:
    """Inputs of a token that a thread has loaded: some keys and queries, a value, and the head's decay and step."""

    keys: Sequence[Value]
    queries: Sequence[Value]
    value: Value
    decay: Value
    step: Value

    @property
    def state(self) -> list[Value]:
        """All of it, as a loop carries it."""
        return [*self.keys, *self.queries, self.value, self.decay, self.step]

    @classmethod
    def of(cls, state: Sequence[Value]) -> _LoadedToken:
        """Return what a loop has carried."""
        *loaded, value, decay, step = state
        return cls(loaded[: len(loaded) // 2], loaded[len(loaded) // 2 :], value, decay, step)


@dataclass(frozen=True)
class _HeadPart:
    """A work item: the numbers of the head and of its 16 elements, and where keys and queries begin in a row."""

    number: Value
    block: Value
    keys: Value
    queries: Value


@dataclass(frozen=True)
class BlockStateUpdateKernel(StateUpdateKernel):
    """The kernel with a half-warp for each chain of sums, which keeps its rows of the matrix in registers.

    What a token needs is loaded while the token before it is computed, and keys and queries are shared.
    """

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        assert isinstance(b, BlockBuilder)
        h = self.heads
        entries, writes, rows, rates, state, out = (b.buffer(i) for i in range(6))
        blocks, count = h.value // LANES, h.key // CHAINS
        shared, sums = b.scratch(2 * h.key * 4), [b.scratch(CHAINS * 64) for _ in range(1 + self.delta)]
        last = b.dim("tokens") - 1
        with b.items() as item:
            states = EntryStates.of(b, item // (h.values * blocks), entries, writes, state)
            block = item % (h.values * blocks)
            number = block // blocks
            key_at = (number % h.keys if h.interleaved else number // h.group) * (h.key * 4)
            head = _HeadPart(number, block, key_at + self.keys * 4, key_at + self.queries * 4)
            at = block * (h.key * 64) + b.team * 64
            matrix = [states.load(b, at + i * (CHAINS * 64)) for i in range(count)]
            first = self._fetch(b, rows, rates, b.load(states.entry, StateEntry.ROW, I64), head)

            def store(record: Value, carried: Sequence[Value], at: Value = at) -> None:
                with b.by_team():
                    for i, row in enumerate(carried[:count]):
                        b.store(row, record, at + i * (CHAINS * 64), 64)

            with states.tokens(b, [*matrix, *first.state], store) as token:
                this = _LoadedToken.of(token.state[count:])
                self._share(b, this, shared)
                after = self._fetch(b, rows, rates, (token.index + 1).min(last), head)
                value, result, matrix = self._update(b, this, shared, sums, token.state[:count])
                if self.skip:
                    result = b.fma(value, b.broadcast(b.load(b.buffer(6), number * 4, F32)), result)
                with b.when(b.compare("eq", b.team, 0)), b.by_team():
                    at_token = token.index * (round_up(h.value_columns, BLOCK) * 4)
                    b.store(result, out, at_token + block * 64, 64)
                token.carry(*matrix, *after.state)

    def _fetch(self, b: BlockBuilder, rows: Value, rates: Value, token: Value, head: _HeadPart) -> _LoadedToken:
        """Load the thread's part of a token."""
        h = self.heads
        row = b.address(rows, token * (round_up(self.columns, BLOCK) * 4))
        keys, queries = (
            [b.load(row, place + at * 4, F32) for at in self._places(b)] for place in (head.keys, head.queries)
        )
        value = b.load(row, head.block * 64 + self.values * 4, VF32, 64)
        pair = b.address(rates, (token * round_up(h.values, 16) + head.number) * 8)
        return _LoadedToken(keys, queries, value, *(b.load(pair, 4 * i, F32) for i in range(2)))

    def _places(self, b: BlockBuilder) -> list[Value]:
        """Return the numbers of the keys that a thread loads; the last one may be several threads'."""
        most = self.heads.key - 1
        return [(b.thread + first).min(most) for first in range(0, self.heads.key, STATE_THREADS)]

    def _share(self, b: BlockBuilder, token: _LoadedToken, shared: Value) -> None:
        """Write keys, then queries to shared memory, which nobody reads any more."""
        for first, values in enumerate((token.keys, token.queries)):
            for place, value in zip(self._places(b), values, strict=True):
                b.store_own([value], shared, (place + first * self.heads.key) * 4)
        b.barrier()

    def _update(
        self, b: BlockBuilder, token: _LoadedToken, shared: Value, sums: Sequence[Value], matrix: Sequence[Value]
    ) -> tuple[Value, Value, list[Value]]:
        """Return what a token adds before its step, q S, and the rows of the chain."""
        mine = b.address(shared, b.team * 4)
        keys, queries = (
            [b.broadcast(b.load(mine, (i * CHAINS + first) * 4, F32)) for i in range(len(matrix))]
            for first in (0, self.heads.key)
        )
        decay, step, value = b.broadcast(token.decay), b.broadcast(token.step), token.value
        if not self.delta:
            added = self._adding(b, value * step)
            return value, *self._chain(b, sums[0], matrix, lambda row, key: added(row * decay, key), keys, queries)
        product, matrix = self._chain(b, sums[0], matrix, lambda row, _: row * decay, keys, keys)
        value = value - product
        return value, *self._chain(b, sums[1], matrix, self._adding(b, value * step), keys, queries)

    @staticmethod
    def _chain(
        b: BlockBuilder, sums: Value, matrix: Sequence[Value], update: Update, keys: Sequence[Value],
        factors: Sequence[Value],
    ) -> tuple[Value, list[Value]]:  # fmt: skip
        """Update the rows, and return the sum of all chains' rows times their factors."""
        total, updated = b.constant(0.0, VF32), []
        for row, key, factor in zip(matrix, keys, factors, strict=True):
            updated.append(update(row, key))
            total = b.fma(updated[-1], factor, total)
        b.store_lanes(total, sums, b.team * 64)
        b.barrier()
        first, second, third, fourth = (b.load(sums, i * 64, VF32, 64) for i in range(CHAINS))
        return (first + second) + (third + fourth), updated
