"""An executor without a model, and the clock that it moves: real sequences, pages and prefix cache, made-up time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine_core.executor import LogprobsEntry
from quire.engine_core.limits import EngineLimits
from quire.kernels.runner import Sequences, TokenMask

EOS = 0
"""The token that ends an answer."""


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step takes, in seconds: so much for itself, for each token of a prompt and for each decode."""

    base: float
    prefill_token: float
    decode: float

    def seconds(self, counts: Sequence[int]) -> float:
        """Of a step that computes so many tokens of each sequence; a single one costs what a decode costs."""
        decodes = counts.count(1)
        return self.base + self.prefill_token * (sum(counts) - decodes) + self.decode * decodes


@dataclass(slots=True)
class SimulatedResult:
    """What a step has drawn. Nobody asks for logprobs, and nothing fails."""

    token_ids: list[int]
    logprobs: None = None
    prompt_logprobs: dict[int, list[LogprobsEntry]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class _CountedSequences(Sequences):
    """Tells how long a sequence is, and is to be, without a copy of its tokens."""

    def __init__(self, num_pages: int, page_size: int, vocab_size: int) -> None:
        super().__init__(num_pages, page_size, vocab_size)
        self.lengths: dict[int, int] = {}  # by slot, in tokens
        self.least_lengths: dict[int, int] = {}  # that min_tokens asks for

    def open(self, token_ids: Sequence[int], num_prompt_tokens: int, *, min_tokens: int = 0, **sampling: Any) -> int:
        slot = super().open(token_ids, num_prompt_tokens, min_tokens=min_tokens, **sampling)
        self.lengths[slot] = len(token_ids)
        self.least_lengths[slot] = num_prompt_tokens + min_tokens
        return slot


class SimulatedExecutor:
    """An `Executor` whose steps move `clock` instead of computing.

    Its model says EOS as soon as `min_tokens` lets it, and not before; so nobody else knows how long an answer will be.
    The tokens before differ from answer to answer.
    """

    def __init__(self, limits: EngineLimits, step_time: StepTime, clock: VirtualClock) -> None:
        self.sequences = _CountedSequences(limits.num_pages, limits.page_size, limits.vocab_size)
        self._vocab_size = limits.vocab_size
        self._step_time = step_time
        self._clock = clock
        self._num_drawn = 0

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        """There is nothing to copy."""
        return self.sequences.fork(slot, source, num_computed, num_tokens)

    def step(
        self, slots: list[int], starts: list[int], counts: list[int], masks: Sequence[tuple[int, TokenMask]] = ()
    ) -> SimulatedResult:
        """Shares what is computed, and draws a token for each sequence that has caught up."""
        self._clock.now += self._step_time.seconds(counts)
        sequences, lengths = self.sequences, self.sequences.lengths
        token_ids = []
        for slot, start, count in zip(slots, starts, counts, strict=True):
            token = -1
            if start + count == lengths[slot]:
                lengths[slot] += 1
                self._num_drawn += 1
                is_last = lengths[slot] >= sequences.least_lengths[slot]
                token = EOS if is_last else 1 + self._num_drawn % (self._vocab_size - 1)
                sequences.append(slot, token)
            token_ids.append(token)
            sequences.share(slot, start + count)
        return SimulatedResult(token_ids)
