"""An executor without a model: real sequences, pages and prefix cache, made-up time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from quire.engine_core.executor import PlainStepResult, UnconstrainedExecutor
from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request
from quire.engine_core.simulation.clock import VirtualClock
from quire.engine_core.simulation.tokens import EOS, answer_tokens
from quire.kernels.runner import SamplingConfig, Sequences
from quire.protocol.simulation import StepTime, StepWork


@dataclass(slots=True)
class _Answer:
    """A sequence: its length in tokens, the one that `min_tokens` asks for, and what it draws."""

    length: int
    least_length: int
    tokens: bytes


class _Sequences(Sequences):
    """Tells how long a sequence is, and is to be, without a copy of its tokens."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits.num_pages, limits.block_size, limits.vocab_size)
        self.answers: dict[int, _Answer] = {}  # by slot
        self.page_size = limits.block_size
        self._num_opened = 0

    def open(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        *,
        sampling: SamplingConfig | None = None,
        **options: Any,
    ) -> int:
        slot = super().open(token_ids, num_prompt_tokens, sampling=sampling, **options)
        self._num_opened += 1
        least_length = num_prompt_tokens + (sampling.min_tokens if sampling is not None else 0)
        self.answers[slot] = _Answer(len(token_ids), least_length, answer_tokens(self._num_opened))
        return slot


class SimulatedExecutor(UnconstrainedExecutor):
    """An `Executor` whose steps move `clock` instead of computing.

    Its model says EOS as soon as `min_tokens` lets it, and not before; who doesn't ignore it ends there.
    """

    def __init__(self, limits: EngineLimits, step_time: StepTime, clock: VirtualClock) -> None:
        self.sequences = _Sequences(limits)
        self._step_time = step_time
        self._clock = clock

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        """There is nothing to copy."""
        return self.sequences.fork(slot, source, num_computed, num_tokens)

    def step(self, slots: list[int], starts: list[int], counts: list[int]) -> PlainStepResult:
        """Shares what is computed, and draws a token for each sequence that has caught up."""
        self._clock.now += self._step_time.seconds(StepWork.of(starts, counts))
        sequences, answers = self.sequences, self.sequences.answers
        page_size = sequences.page_size
        spans: list[list[int]] = []
        for slot, start, count in zip(slots, starts, counts, strict=True):
            span, end, answer = [], start + count, answers[slot]
            if end == answer.length:
                answer.length += 1
                token = EOS if answer.length >= answer.least_length else answer.tokens[end & 15]
                sequences.append(slot, token)
                span = [token]
            if count > 1 or end % page_size == 0:
                sequences.share(slot, end)
            spans.append(span)
        return PlainStepResult(spans)

    def tokens_left(self, slot: int, token_limit: int) -> int:
        """How many a sequence of at most so many tokens is still to draw."""
        answer = self.sequences.answers[slot]
        return min(answer.least_length, token_limit) - answer.length

    def seconds(self, prompts: Sequence[tuple[Request, int]], decodes: int, kv_tokens: int) -> float:
        """What a step takes with chunks of prompts, beside sequences that decode and have so many tokens of KV."""
        work = StepWork.of([request.num_computed_tokens for request, _ in prompts], [count for _, count in prompts])
        tokens, singles, read, squares = work
        return self._step_time.seconds(StepWork(tokens, singles + decodes, read + kv_tokens, squares))

    def decode_ends(self, begin: float, decodes: int, kv_tokens: int, count: int) -> array[float]:
        """When each of so many steps ends in which so many sequences decode, which have `kv_tokens` in the first."""
        read = range(kv_tokens, kv_tokens + decodes * count, decodes)
        seconds = (self._step_time.seconds(StepWork(0, decodes, tokens, 0)) for tokens in read)
        ends = array("d", accumulate(seconds, initial=begin))
        del ends[0]
        return ends

    def extend(self, slot: int, count: int) -> None:
        """Draws so many tokens, none of them the last, for a sequence that has pages for those before each."""
        answer, append = self.sequences.answers[slot], self.sequences.append
        for position in range(answer.length, answer.length + count):
            append(slot, answer.tokens[position & 15])
        answer.length += count
        self.sequences.share(slot, answer.length - 1)
