"""What the benchmark sees of an engine, ours or a peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bench.work import Answer, Decode, Work


class BenchError(RuntimeError):
    """Something that the user can mend; the text says what."""


StepBytes = Callable[[Decode], int]
"""Bytes that a step of a decode cannot do without: all weights once, the keys and values of every token before it."""


class Engine(ABC):
    """An engine with its model loaded. Those of one `name` are variants, of which the better one counts."""

    def __init__(self, name: str, variant: str, step_bytes: StepBytes, *, ours: bool = False) -> None:
        self.name = name
        self.variant = variant
        self.step_bytes = step_bytes
        self.ours = ours

    @property
    def full_name(self) -> str:
        """The name and the variant."""
        return f"{self.name} {self.variant}".strip()

    def prepare(self, work: Work) -> None:
        """Get ready for prompts of this shape; not timed."""
        del work

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While it is this engine's turn; between its turns it uses no CPU."""
        yield

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> Answer:
        """Generate exactly so many tokens for each prompt, greedily. Raises `BenchError`."""

    @abstractmethod
    def close(self) -> None:
        """End it, leaving no process behind. Idempotent."""
