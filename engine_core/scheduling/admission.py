"""Whether there will be pages for one more request, by what those that run are likely to need still."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request

_BLEND = 0.02  # weight of one more answer: the estimate is of the last fifty or so
_FIRST_ESTIMATE = 512.0  # output tokens, before any answer has ended
_FIRST_WEIGHT = 4.0  # of that estimate, in answers
_WATERMARK = 0.01  # of all pages, kept for answers that turn out longer
_STEPS_TO_GROW = 32  # without a preemption, for one more request to run
_PREEMPTIONS = 0.004  # for each answer that ends: what is aimed at
_LEARN_SHARE = 0.1  # of the growth that is reserved, for each preemption more than that


class Admission:
    """Estimates of output lengths, and a limit on those that run which memory pressure lowers.

    Requests don't all end at once, so they never need all of their pages together. How much less depends on the load;
    `reserved_share` finds it out: it falls as answers end and rises with preemptions, so that these stay rare.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.output_tokens = _FIRST_ESTIMATE  # of an answer
        self.reserved_share = 1.0  # of what those that run are likely to need still
        self._answers = _FIRST_WEIGHT  # that have ended, the earlier the less they count
        self._tokens = _FIRST_WEIGHT * _FIRST_ESTIMATE  # sampled in that time
        self._calm_steps = 0
        self.max_running = limits.max_num_seqs
        self.watermark = int(limits.num_pages * _WATERMARK)

    def ended(self) -> None:
        """An answer has ended, whatever ended it."""
        self._answers = (1 - _BLEND) * (self._answers + 1)
        self._tokens *= 1 - _BLEND
        self.reserved_share = max(0.0, self.reserved_share - _LEARN_SHARE * _PREEMPTIONS)

    def decoded(self, num_tokens: int) -> None:
        """A step makes answers longer by so many tokens.

        All tokens over all ends is the mean length, also while the long answers still run; the mean of those that have
        ended would be too short then.
        """
        self._tokens += num_tokens
        self.output_tokens = self._tokens / self._answers

    def preempted(self, num_victims: int, num_running: int) -> None:
        """Pages ran out: `num_victims` requests had to give way, `num_running` sequences are left."""
        self.max_running = max(1, num_running)
        self._calm_steps = 0
        self.reserved_share = min(1.0, self.reserved_share + _LEARN_SHARE * num_victims)

    def stepped(self) -> None:
        """A step without a preemption."""
        self._calm_steps += 1
        if self._calm_steps % _STEPS_TO_GROW == 0:
            self.max_running = min(self.max_running + 1, self._limits.max_num_seqs)

    def pages_to_grow(self, running: Iterable[Request]) -> int:
        """Pages that these are likely to take still. Asked of all in each step in which others wait: keep it short."""
        pages = 0
        for request in running:
            if request.search is not None:
                pages += self.projected_pages(request) - self._held_pages(request)
            elif (missing := self._likely_tokens(request) - request.num_reserved_tokens) > 0:
                pages += self._limits.pages_for(missing)
        return pages

    def projected_pages(self, request: Request) -> int:
        """Pages that a request is likely to have in the end."""
        tokens = max(self._likely_tokens(request), request.num_tokens, request.num_reserved_tokens)
        return beam_pages(request.num_prompt_tokens, tokens, request.width, self._limits)

    def _likely_tokens(self, request: Request) -> int:
        """Tokens in the end. Who is past the estimate may well go on for half of it."""
        prompt, estimate = len(request.prompt_token_ids), self.output_tokens
        return min(prompt + int(max(estimate, request.num_tokens - prompt + estimate / 2)), request.token_limit)

    def _held_pages(self, request: Request) -> int:
        num_sequences = len(request.slots)
        return beam_pages(request.num_prompt_tokens, request.num_reserved_tokens, num_sequences, self._limits)


def beam_pages(num_prompt_tokens: int, num_tokens: int, num_sequences: int, limits: EngineLimits) -> int:
    """Pages of so many sequences of `num_tokens` each that share what fills pages of their prompt, and no more."""
    shared = num_prompt_tokens // limits.block_size if num_sequences > 1 else 0
    return shared + num_sequences * (limits.pages_for(num_tokens) - shared)
