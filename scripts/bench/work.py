"""Works that are measured: the prefill of a prompt, and the decode of a batch at a context length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEP_TOKENS = 2048
"""Limit of a step's tokens in every engine; Quire's default."""


LEAST_SHARE = 0.5
"""Least share of a decode, from its first token to its last, in which all sequences must run."""

Prompts = Callable[[int, int, int], list[list[int]]]
"""Makes prompts by a seed, their number and their tokens."""

Arrivals = Sequence[tuple[float, int]]
"""Times at which tokens of one sequence arrived, on the clock of its batch, and their numbers."""


@dataclass(frozen=True)
class BatchTiming:
    """Timing of a batch: the seconds from its submission to its end, and the arrivals of each sequence."""

    seconds: float
    sequences: tuple[Arrivals, ...]

    @property
    def window(self) -> tuple[float, float]:
        """Times of the last sequence's first token and of the first sequence's last token."""
        return max(arrivals[0][0] for arrivals in self.sequences), min(arrivals[-1][0] for arrivals in self.sequences)

    @property
    def share(self) -> float:
        """Share of the time between the first token and the last one in which all sequences ran; negative if never."""
        begin, end = self.window
        first = min(arrivals[0][0] for arrivals in self.sequences)
        last = max(arrivals[-1][0] for arrivals in self.sequences)
        return (end - begin) / (last - first) if last > first else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of all sequences together while all of them ran."""
        begin, end = self.window
        return sum(count for arrivals in self.sequences for at, count in arrivals if begin < at <= end) / (end - begin)


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

    @property
    def length(self) -> int:
        """Tokens that the sequence generates."""
        return 1

    def rate(self, timing: BatchTiming) -> float:
        """Return tokens per second."""
        return self.context / timing.seconds


@dataclass(frozen=True)
class Decode:
    """`batch` sequences with prompts of `context` tokens, each of which generates `length` tokens.

    The rate is that of all tokens that arrive while all sequences run: after the first token of the sequence that
    starts last, up to the last token of the one that ends first. No prompt is computed meanwhile.
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
        return self.context + self.length

    @property
    def mean_context(self) -> float:
        """Mean over its steps of the tokens that a sequence attends to."""
        return self.context + self.length / 2

    def rate(self, timing: BatchTiming) -> float:
        """Return tokens per second. Raises `ValueError` if all sequences ran together too briefly."""
        if timing.share < LEAST_SHARE:
            raise ValueError(
                f"{self.name}: all {self.batch} sequences ran together for {max(0.0, timing.share):.0%} of the decode, "
                f"and less than {LEAST_SHARE:.0%} says nothing about such batches; choose a longer --gen"
            )
        return timing.rate


Work = Prefill | Decode


def random_prompts(seed: int, batch: int, context: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random ids, without the lowest ones, which may be special tokens."""
    random_ = random.Random(seed)
    return [[random_.randrange(8, vocab_size) for _ in range(context)] for _ in range(batch)]


def text_prompts(seed: int, batch: int, context: int, *, texts: list[list[int]]) -> list[list[int]]:
    """Return the first `context` tokens of texts, other ones for each seed as long as there are enough.

    Raises ValueError for a text that is too short.
    """
    chosen = [texts[(seed * batch + number) % len(texts)][:context] for number in range(batch)]
    if (shortest := min(map(len, chosen))) < context:
        raise ValueError(f"a text has {shortest} tokens, and {context} are to be its prompt; give longer texts")
    return chosen


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
