"""State entries: the tokens of a sequence in a step, and the records of state that they read and write (abi.h).

A work item walks an entry's tokens in order with its own part of the layer's state in registers or on its stack. So
the state after a token depends on the tokens up to it, and on nothing else: not on how the tokens came in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire.kernels._native import StateEntry, StateWrite
from quire.kernels.emit.builder import I64, VF32, Builder, Loop, Value


@dataclass(frozen=True)
class EntryStates:
    """An entry, and where a layer's state lies in the first record."""

    entry: Value
    writes: Value
    layer: Value

    @classmethod
    def of(cls, b: Builder, number: Value, entries: Value, writes: Value, layer: Value) -> EntryStates:
        """Return entry `number` of a step's."""
        return cls(b.address(entries, number * StateEntry.BYTES), writes, layer)

    def load(self, b: Builder, offset: Value) -> Value:
        """Load 16 lanes of the state before the entry's first token, `offset` bytes from the layer's first ones."""
        record = b.load(self.entry, StateEntry.RECORD, I64)
        value = b.load(self.layer, record.max(0) + offset, VF32, 64)
        return b.select(b.compare("slt", record, 0), b.constant(0.0, VF32), value)

    @contextmanager
    def tokens(
        self, b: Builder, state: Sequence[Value], store: Callable[[Value, Sequence[Value]], None]
    ) -> Iterator[Loop]:
        """Open a loop over the rows of the entry's tokens, carrying `state` from one to the next.

        `store(record, state)` emits the writing of the state to a record, given the address of its part of this layer.
        """
        row, first = (b.load(self.entry, offset, I64) for offset in (StateEntry.ROW, StateEntry.FIRST))
        stop = first + b.load(self.entry, StateEntry.WRITES, I64)
        with b.loop(first, stop, state=[row, *state]) as write:
            at = b.address(self.writes, write.index * StateWrite.BYTES)
            end, record = b.load(at, StateWrite.END, I64), b.load(at, StateWrite.RECORD, I64)
            with b.loop(write.state[0], end, state=write.state[1:]) as token:
                yield token
            with b.when(record >= 0):
                store(b.address(self.layer, record), token.results)
            write.carry(end, *token.results)
