"""Admission: an estimate of the pages that running requests still need, and so of the room for one more."""

from __future__ import annotations

from collections.abc import Collection

from quire.engine_core.request import Request
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape

_BLEND = 0.02  # weight of one more output: the estimate is of the last fifty or so
_FIRST_ESTIMATE = 512.0  # output tokens, before any request has ended
_FIRST_WEIGHT = 4.0  # of that estimate, in requests
_WATERMARK = 0.01  # of all pages, kept for outputs that turn out longer
_STEPS_TO_GROW = 32  # without a preemption, before one more request may run
_PREEMPTIONS = 0.004  # target: preemptions for each request that ends
_LEARN_SHARE = 0.1  # change of `reserved_share` for each preemption beyond the target


class Admission:
    """An estimate of output lengths, and a limit on running requests that memory pressure lowers.

    Requests don't all end at once, so they never need all of their pages together. How much less depends on the load;
    `reserved_share` learns it: it falls as requests end and rises with preemptions, so that these stay rare.
    """

    def __init__(self, limits: EngineShape) -> None:
        self._limits = limits
        self.output_tokens = _FIRST_ESTIMATE  # of a request
        self.reserved_share = 1.0  # of the growth that is likely
        self._num_ended = _FIRST_WEIGHT  # requests, older ones with less weight
        self._tokens = _FIRST_WEIGHT * _FIRST_ESTIMATE  # sampled in that time, weighted alike
        self._calm_steps = 0
        self.max_running = limits.max_num_seqs
        self.watermark = int(limits.num_pages * _WATERMARK)

    def ended(self) -> None:
        """Note that a request with output has ended, for whatever reason."""
        self._num_ended = (1 - _BLEND) * (self._num_ended + 1)
        self._tokens *= 1 - _BLEND
        self.reserved_share = max(0.0, self.reserved_share - _LEARN_SHARE * _PREEMPTIONS)

    def decoded(self, num_tokens: int) -> None:
        """Note that a step makes outputs longer by `num_tokens`.

        All tokens over all ends is the mean length, also while the long outputs still run; the mean of the ended ones
        would be too short then.
        """
        self._tokens += num_tokens
        self.output_tokens = self._tokens / self._num_ended

    def preempted(self, num_victims: int, num_running: int) -> None:
        """Note that pages ran out: `num_victims` requests were preempted, `num_running` sequences are left."""
        self.max_running = max(1, num_running)
        self._calm_steps = 0
        self.reserved_share = min(1.0, self.reserved_share + _LEARN_SHARE * num_victims)

    def stepped(self) -> None:
        """Note a step without a preemption."""
        self._calm_steps += 1
        if self._calm_steps % _STEPS_TO_GROW == 0:
            self.max_running = min(self.max_running + 1, self._limits.max_num_seqs)

    def reserved_pages(self, growth: int) -> int:
        """Return the pages to keep available for requests that are likely to grow by `growth` pages."""
        return int(self.reserved_share * growth) + self.watermark

    def pages_to_grow(self, running: Collection[Request], sequences: Sequences) -> int:
        """Return the pages that running requests are likely to take still.

        Asked about all of them in each step in which others wait: keep it short.
        """
        single = [request for request in running if request.decoding.width == 1]
        wide = (request for request in running if request.decoding.width > 1)
        pages = sum(self.projected_pages(request) - self._held_pages(request) for request in wide)
        tokens = [self._likely_tokens(request) for request in single]
        return pages + sequences.pages_lacked([request.slot for request in single], tokens)

    def projected_pages(self, request: Request) -> int:
        """Return the pages that a request is likely to have at its end."""
        tokens = max(self._likely_tokens(request), request.num_tokens)
        return self._limits.pages_of_sequences(request.num_prompt_tokens, tokens, request.width)

    def expected_tokens(self, request: Request) -> float:
        """Return the tokens that a request costs: its prompt, and the likely output of all its sequences."""
        prompt = request.num_prompt_tokens
        return prompt + request.width * (self._likely_tokens(request) - prompt)

    def _likely_tokens(self, request: Request) -> int:
        """Tokens at its end. A request past the estimate may well go on for half of it."""
        prompt, estimate = request.num_prompt_tokens, self.output_tokens
        return min(prompt + int(max(estimate, request.num_tokens - prompt + estimate / 2)), request.stop.token_limit)

    def _held_pages(self, request: Request) -> int:
        num_sequences = len(request.slots)
        return self._limits.pages_of_sequences(request.num_prompt_tokens, request.num_reserved_tokens, num_sequences)
