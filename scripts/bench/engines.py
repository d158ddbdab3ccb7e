"""Interface of the engines that are benchmarked: Quire and its peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from bench.builds import Build
from bench.work import Arrivals, BatchTiming, Decode, Work


class BenchError(RuntimeError):
    """An error that the user can fix; the text says how."""


StepBytes = Callable[[Decode], int]
"""Bytes that a decode step has to read: all weights once, and the keys and values of every token before it."""


class BenchEngine(ABC):
    """An engine with its model loaded. Engines of one `name` are variants, of which the better one counts."""

    def __init__(
        self, name: str, variant: str, step_bytes: StepBytes, *, ours: bool = False, on_gpu: bool = False
    ) -> None:
        self.name = name
        self.variant = variant
        self.step_bytes = step_bytes
        self.ours = ours
        self.on_gpu = on_gpu

    @property
    def full_name(self) -> str:
        """Name and variant."""
        return f"{self.name} {self.variant}".strip()

    def prepare(self, work: Work) -> None:
        """Get ready for prompts of this shape; not timed."""
        del work

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the engine run; between its turns it uses no CPU."""
        yield

    @property
    @abstractmethod
    def build(self) -> Build:
        """Build of the engine, with the commands by which it was started so far."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchTiming:
        """Generate exactly `max_tokens` tokens for each prompt, greedily. Raises `BenchError`."""

    @abstractmethod
    def close(self) -> None:
        """End the engine, leaving no process behind. Idempotent."""


def checked(name: str, sequences: Iterable[Arrivals], batch: int, max_tokens: int) -> tuple[Arrivals, ...]:
    """Return the arrivals of a batch, each with exactly `max_tokens` tokens. Raises `BenchError`."""
    found = tuple(sequences)
    counts = [sum(count for _, count in arrivals) for arrivals in found]
    if counts != [max_tokens] * batch:
        raise BenchError(f"{name} gave {counts} tokens instead of {max_tokens} to each of {batch}")
    return found
