"""Whether there will be pages for one more request, by what those that run are likely to need still."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request

_BLEND = 0.02  # weight of one more answer, after some: the estimate is of the last fifty or so
_FIRST_ESTIMATE = 128.0  # output tokens, before any answer has ended
_WATERMARK = 0.01  # of all pages, kept for answers that turn out longer
_STEPS_TO_GROW = 32  # without a preemption, for one more request to run


class Admission:
    """Estimates of output lengths, and a limit on those that run which memory pressure lowers."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.output_tokens = _FIRST_ESTIMATE  # of an answer, a mean that forgets
        self._num_answers = 0
        self._calm_steps = 0
        self.max_running = limits.max_num_seqs
        self.watermark = int(limits.num_pages * _WATERMARK)

    def learn(self, num_output_tokens: int) -> None:
        """An answer has ended by itself."""
        self._num_answers += 1
        weight = max(_BLEND, 1 / (self._num_answers + 1))
        self.output_tokens += weight * (num_output_tokens - self.output_tokens)

    def preempted(self, num_running: int) -> None:
        """Pages ran out: `num_running` are left."""
        self.max_running = max(1, num_running)
        self._calm_steps = 0

    def stepped(self) -> None:
        """A step without a preemption."""
        self._calm_steps += 1
        if self._calm_steps % _STEPS_TO_GROW == 0:
            self.max_running = min(self.max_running + 1, self._limits.max_num_seqs)

    def pages_to_grow(self, running: Iterable[Request]) -> int:
        """Pages that these are likely to take still."""
        return sum(self.projected_pages(request) - self._held_pages(request) for request in running)

    def projected_pages(self, request: Request) -> int:
        """Pages that a request is likely to have in the end. Who is past the estimate may well go on for half of it."""
        output = max(self.output_tokens, request.num_output_tokens + self.output_tokens / 2)
        tokens = min(request.num_prompt_tokens + int(output), request.token_limit)
        tokens = max(tokens, request.num_tokens, request.num_reserved_tokens)
        return beam_pages(request.num_prompt_tokens, tokens, request.width, self._limits)

    def _held_pages(self, request: Request) -> int:
        num_sequences = len(request.slots)
        return beam_pages(request.num_prompt_tokens, request.num_reserved_tokens, num_sequences, self._limits)


def beam_pages(num_prompt_tokens: int, num_tokens: int, num_sequences: int, limits: EngineLimits) -> int:
    """Pages of so many sequences of `num_tokens` each that share what fills pages of their prompt, and no more."""
    shared = num_prompt_tokens // limits.page_size if num_sequences > 1 else 0
    return shared + num_sequences * (limits.pages_for(num_tokens) - shared)
