"""Works that are measured: the prefill of a prompt, and the decode of a batch at a context length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEP_TOKENS = 2048
"""Limit of a step's tokens in every engine; Quire's default."""


@dataclass(frozen=True)
class SequenceTiming:
    """Timing of one sequence: the times of its first and last token on one clock, and the number after the first."""

    first: float
    last: float
    later_tokens: int


@dataclass(frozen=True)
class BatchTiming:
    """Timing of a batch: the seconds from its submission to its end, and its sequences."""

    seconds: float
    sequences: tuple[SequenceTiming, ...]


@dataclass(frozen=True)
class Prefill:
    """One prompt of `context` tokens. The rate is its tokens over the time to the first token of the timing."""

    context: int
    batch: int = 1

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"prefill {self.context}"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.context + 1

    def max_tokens(self) -> list[int]:
        """Return the number of tokens that each sequence generates."""
        return [1]

    def rate(self, timing: BatchTiming) -> float:
        """Return tokens per second."""
        return self.context / timing.seconds

    def overlap(self, timing: BatchTiming) -> float:
        """Return the share of the measured time in which all sequences ran."""
        del timing
        return 1.0


@dataclass(frozen=True)
class Decode:
    """`batch` sequences with prompts of `context` tokens, each of which generates `length` tokens.

    The rate is batch * (G2 - G1) / (t2 - t1), where t1 is when the sequence that started last had its first token
    (G1 = 1), and t2 when it had all of them (G2 = length): prefill, start and submission are not included. Prompts
    longer than a step start one after the other, so earlier ones generate some more tokens, and all end together.
    """

    batch: int
    context: int
    length: int

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"decode {self.batch}x{self.context}"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.context + max(self.max_tokens())

    @property
    def mean_context(self) -> float:
        """Mean over its steps of the tokens that a sequence attends to."""
        return self.context + self.length / 2

    def max_tokens(self) -> list[int]:
        """Return the number of tokens that each sequence generates, in the order of submission."""
        started = [-(-(number * self.context) // STEP_TOKENS) for number in range(1, self.batch + 1)]
        return [self.length + started[-1] - step for step in started]

    def rate(self, timing: BatchTiming) -> float:
        """Return tokens per second of the whole batch. Raises `ValueError` when all tokens arrived at once."""
        last = _last_started(timing)
        if last.last <= last.first:
            raise ValueError(f"{self.name}: all tokens of a sequence arrived at once; choose a longer --gen")
        return self.batch * last.later_tokens / (last.last - last.first)

    def overlap(self, timing: BatchTiming) -> float:
        """Return the share of the measured time in which all sequences ran."""
        last = _last_started(timing)
        return (min(one.last for one in timing.sequences) - last.first) / (last.last - last.first)


Work = Prefill | Decode


def _last_started(timing: BatchTiming) -> SequenceTiming:
    return max(timing.sequences, key=lambda one: one.first)


def random_prompts(seed: int, batch: int, context: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random ids, without the lowest ones, which may be special tokens."""
    random_ = random.Random(seed)
    return [[random_.randrange(8, vocab_size) for _ in range(context)] for _ in range(batch)]


def parse_prefill(text: str) -> tuple[Prefill, ...]:
    """Parse `128,512`. Raises `ValueError`."""
    return tuple(Prefill(_count(part, "a length such as 512")) for part in _parts(text))


def parse_decode(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `1x64,8x2048` into pairs of batch and context. Raises `ValueError`."""
    shapes = []
    for part in _parts(text):
        batch, _, context = part.partition("x")
        what = "BATCHxCONTEXT such as 8x64"
        shapes.append((_count(batch, what, part), _count(context, what, part)))
    return tuple(shapes)


def _parts(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _count(text: str, what: str, whole: str | None = None) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{whole or text!r} is not {what}")
    return int(text)
