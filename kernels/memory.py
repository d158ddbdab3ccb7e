"""The memory of an engine's process, planned before any of it is taken: its ceiling, and what shares it."""

from __future__ import annotations

from dataclasses import dataclass

PROGRAM_BYTES = 256 << 20
"""The program itself: interpreter, libraries, compiled kernels, stacks, the tokenizer of grammars."""

_LEAST_RESERVE = 64 << 20
_MOST_RESERVE = 2 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the process by purpose. `reserve` is for what grows and shrinks with the requests."""

    weights: int
    buffers: int
    kv: int
    reserve: int

    @property
    def limit(self) -> int:
        """The ceiling: all of them, and the program."""
        return PROGRAM_BYTES + self.weights + self.buffers + self.kv + self.reserve

    def describe(self) -> str:
        """Return the parts in words."""
        return (
            f"weights {self.weights}, buffers {self.buffers}, KV pages {self.kv}, program {PROGRAM_BYTES}, requests "
            f"and their answers {self.reserve}"
        )


def reserve_within(limit: int) -> int:
    """Return the reserve of a process with this ceiling: an eighth of it, from 64 MiB to 2 GiB."""
    return min(max(limit // 8, _LEAST_RESERVE), _MOST_RESERVE)


def reserve_above(planned: int) -> int:
    """Return the reserve within the least ceiling of a process that plans these bytes besides."""
    return min(max(-(-planned // 7), _LEAST_RESERVE), _MOST_RESERVE)


def reserve_beside(left: int) -> int:
    """Return the reserve of a process without a ceiling of its own, where `left` bytes are free: half of them."""
    return min(max(left // 2, _LEAST_RESERVE), _MOST_RESERVE)
