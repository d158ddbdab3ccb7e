"""What is measured: the prefill of a prompt, and the decode of a batch at a context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEP_TOKENS = 2048
"""Tokens of a step at most, in every engine; Quire's default."""


@dataclass(frozen=True)
class Generated:
    """One sequence of an answer: when its first and last tokens came, on one clock, and how many after the first."""

    first: float
    last: float
    later_tokens: int


@dataclass(frozen=True)
class Answer:
    """What an engine says of a batch: the seconds from giving it until all was back, and its sequences."""

    seconds: float
    sequences: tuple[Generated, ...]


@dataclass(frozen=True)
class Prefill:
    """One prompt of `context` tokens: its tokens over the time until the first token of the answer was there."""

    context: int
    batch: int = 1

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"prefill {self.context}"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.context + 1

    def max_tokens(self) -> list[int]:
        """How many tokens each sequence generates."""
        return [1]

    def rate(self, answer: Answer) -> float:
        """Tokens a second."""
        return self.context / answer.seconds

    def together(self, answer: Answer) -> float:
        """The part of the measured time in which all sequences ran."""
        del answer
        return 1.0


@dataclass(frozen=True)
class Decode:
    """`batch` sequences with prompts of `context` tokens, each of which generates `length` tokens.

    The rate is batch * (G2 - G1) / (t2 - t1), where t1 is when the sequence that started last had its first token
    (G1 = 1), and t2 when it had all (G2 = length): prefill, start and submission are outside. Prompts longer than
    a step start one after the other, so the earlier ones are given some tokens more, and all end together.
    """

    batch: int
    context: int
    length: int

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"decode {self.batch}x{self.context}"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.context + max(self.max_tokens())

    @property
    def mean_context(self) -> float:
        """Tokens that a sequence attends to, on average over its steps."""
        return self.context + self.length / 2

    def max_tokens(self) -> list[int]:
        """How many tokens each sequence generates, in the order of submission."""
        started = [-(-(number * self.context) // STEP_TOKENS) for number in range(1, self.batch + 1)]
        return [self.length + started[-1] - step for step in started]

    def rate(self, answer: Answer) -> float:
        """Tokens a second of the whole batch. Raises `ValueError` when all tokens came at once."""
        last = _last_started(answer)
        if last.last <= last.first:
            raise ValueError(f"{self.name}: all tokens of a sequence came at once; choose a longer --gen")
        return self.batch * last.later_tokens / (last.last - last.first)

    def together(self, answer: Answer) -> float:
        """The part of the measured time in which all sequences ran."""
        last = _last_started(answer)
        return (min(one.last for one in answer.sequences) - last.first) / (last.last - last.first)


Work = Prefill | Decode


def _last_started(answer: Answer) -> Generated:
    return max(answer.sequences, key=lambda one: one.first)


def random_prompts(seed: int, batch: int, context: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random ids, without the lowest, which may be special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(8, vocab_size) for _ in range(context)] for _ in range(batch)]


def parse_prefill(text: str) -> tuple[Prefill, ...]:
    """`128,512`. Raises `ValueError`."""
    return tuple(Prefill(_count(part, "a length such as 512")) for part in _parts(text))


def parse_decode(text: str) -> tuple[tuple[int, int], ...]:
    """`1x64,8x2048` as pairs of batch and context. Raises `ValueError`."""
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
