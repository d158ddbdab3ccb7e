"""An executor without a model: real sequences, pages and prefix cache, virtual time.

Tokens of simulated prompts and answers have no meaning: they only have to differ where they should. A token is a byte,
since Python keeps the small integers ready: the lists of a million prompts cost no objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from quire.engine_core.executor import PlainStepResult
from quire.engine_core.planned_executor import PlannedExecutor
from quire.engine_core.scheduling.prefill_budget import PrefillRequest
from quire.kernels.runner import SamplingConfig, Sequences, StepInput
from quire.protocol.engine_shape import EngineShape
from quire.protocol.simulation import StepTime, StepWork

VOCAB_SIZE = 257
EOS = 256
"""The token that ends an answer of unknown length; no prompt has it."""

_NAME_TOKENS = 16  # of a block or an answer: enough that no two have the same, or any part of their pages
_ANSWERS = b"answers"


def prompt_tokens(blocks: Sequence[int], block_tokens: int, length: int) -> list[int]:
    """Return the first `length` tokens of a prompt of these blocks, which are equal where the blocks are.

    Raises ValueError if there are fewer blocks than the tokens need.
    """
    if len(blocks) * block_tokens < length or block_tokens < 1:
        raise ValueError(
            f"{len(blocks)} blocks of {block_tokens} tokens can't make a prompt of {length}; "
            f"give {-(-length // max(block_tokens, 1))} blocks"
        )
    size = min(block_tokens, _NAME_TOKENS)
    times = -(-block_tokens // size)
    prompt = b"".join((_name(block, size) * times)[:block_tokens] for block in blocks)
    return list(prompt[:length])


def answer_tokens(number: int) -> bytes:
    """Return tokens that no prompt and no other answer has, to be sampled in turn, over and over."""
    return _name(number, _NAME_TOKENS, _ANSWERS)


def _name(number: int, size: int, person: bytes = b"") -> bytes:
    return blake2b(number.to_bytes(16, "little", signed=True), digest_size=size, person=person).digest()


class VirtualClock:
    """A clock that stands still until its owner moves it; seconds since the simulation began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@dataclass(slots=True)
class _SimulatedSequence:
    """A sequence: its length in tokens, the one that `min_tokens` asks for, and the tokens to sample."""

    length: int
    least_length: int
    tokens: bytes


class _SimulatedSequences(Sequences):
    """Sequences that know how long each is, and is to be, without a copy of its tokens."""

    def __init__(self, limits: EngineShape) -> None:
        super().__init__(limits.num_pages, limits.block_size, limits.vocab_size)
        self.answers: dict[int, _SimulatedSequence] = {}  # by slot
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
        self.answers[slot] = _SimulatedSequence(len(token_ids), least_length, answer_tokens(self._num_opened))
        return slot


class SimulatedExecutor(PlannedExecutor):
    """An executor whose steps move `clock` instead of computing.

    Its model samples EOS as soon as `min_tokens` lets it, and not before; requests that do not ignore it end there.
    """

    sequences: _SimulatedSequences

    def __init__(self, limits: EngineShape, step_time: StepTime, clock: VirtualClock) -> None:
        super().__init__(_SimulatedSequences(limits), self._sample)
        self.accept: Callable[[int], int] = lambda num_drafts: 0
        self._step_time = step_time
        self._clock = clock

    def submit(self, step: StepInput) -> PlainStepResult:
        """Share the computed pages, and sample a token for each sequence that has caught up. There are no branches."""
        if step.num_drafts:
            assert not step.branches
            return self._submit_drafts(step)
        self._clock.now += self._step_time.seconds(StepWork.of(step.starts, step.counts))
        return super().submit(step)

    def _sample(self, slot: int, end: int) -> int:
        """Return the next token of an answer, which gets longer."""
        answer = self.sequences.answers[slot]
        answer.length += 1
        return EOS if answer.length >= answer.least_length else answer.tokens[end & 15]

    def _submit_drafts(self, step: StepInput) -> PlainStepResult:
        """Compute drafts too, each of which takes as long as a decoding sequence."""
        starts, num_drafts = step.starts, step.num_drafts
        plain = [count - drafts for count, drafts in zip(step.counts, num_drafts, strict=True)]
        work = StepWork.of(starts, plain)
        read = sum(start * drafts for start, drafts in zip(starts, num_drafts, strict=True))
        work = work._replace(decodes=work.decodes + sum(num_drafts), kv_tokens=work.kv_tokens + read)
        self._clock.now += self._step_time.seconds(work)
        spans: list[list[int]] = []
        for slot, start, count, drafts in zip(step.slots, starts, plain, num_drafts, strict=True):
            span, answer = list[int](), self.sequences.answers[slot]
            if start + count == answer.length:
                for _ in range(1 + self.accept(drafts)):
                    span.append(self._sample(slot, answer.length))
                    self.sequences.append(slot, span[-1])
                    if span[-1] == EOS:
                        break
            self.sequences.share(slot, start + count + max(len(span) - 1, 0))
            spans.append(span)
        return PlainStepResult(spans)

    def tokens_left(self, slot: int, token_limit: int) -> int:
        """Return how many tokens a sequence still samples if it may have at most `token_limit`."""
        answer = self.sequences.answers[slot]
        return min(answer.least_length, token_limit) - answer.length

    def seconds(self, prompts: Sequence[tuple[PrefillRequest, int]], decodes: int, kv_tokens: int) -> float:
        """Return the time of a step with prompt chunks and `decodes` sequences of `kv_tokens` positions in all."""
        work = StepWork.of([prompt.num_computed_tokens for prompt, _ in prompts], [count for _, count in prompts])
        tokens, singles, read, squares = work
        return self._step_time.seconds(StepWork(tokens, singles + decodes, read + kv_tokens, squares))

    def decode_ends(self, begin: float, decodes: int, kv_tokens: int, count: int) -> array[float]:
        """Return the ends of `count` steps of `decodes` sequences, of `kv_tokens` positions in all in the first."""
        read = range(kv_tokens, kv_tokens + decodes * count, decodes)
        seconds = (self._step_time.seconds(StepWork(0, decodes, tokens, 0)) for tokens in read)
        ends = array("d", accumulate(seconds, initial=begin))
        del ends[0]
        return ends

    def extend(self, slot: int, count: int) -> None:
        """Sample `count` tokens, none of them the last, for a sequence that has pages for the positions before each."""
        answer, append = self.sequences.answers[slot], self.sequences.append
        for position in range(answer.length, answer.length + count):
            append(slot, answer.tokens[position & 15])
        answer.length += count
        self.sequences.share(slot, answer.length - 1)
