"""How many prompt tokens a step may compute, so that those who decode beside it hardly notice."""

from __future__ import annotations

_BLEND = 0.1  # weight of a new measurement
_STRETCH = 1.7  # times a step without prompts: what a step with prompts may take
_MOST_STRETCH = 4.0
_BACKLOG_SECONDS = 4.0  # of prefill that waits, for each step's time more
_ALONE_SECONDS = 0.5  # of a step in which nobody decodes: how long one who comes may have to wait


class Pace:
    """Learns from the steps what a token of a prompt and what a step of decodes take, in seconds."""

    def __init__(self, least_chunk: int) -> None:
        """`least_chunk`: tokens, of which chunks are multiples."""
        self._least_chunk = least_chunk
        self._prefill_token = 0.0
        self._decode_step = 0.0

    def learn(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """One step took so long."""
        if num_prefill_tokens == 0:
            self._decode_step = _blend(self._decode_step, seconds)
        elif num_prefill_tokens >= self._least_chunk:
            rest = seconds - (self._decode_step if num_decodes else 0.0)
            self._prefill_token = _blend(self._prefill_token, max(rest, 0.1 * seconds) / num_prefill_tokens)

    def prefill_tokens(self, most: int, num_decodes: int, backlog: int) -> int:
        """Tokens of prompts for the next step, at most `most`, when `backlog` are still to be computed."""
        if self._prefill_token == 0.0:
            return most
        seconds = _ALONE_SECONDS
        if num_decodes and self._decode_step:
            stretch = min(_STRETCH + backlog * self._prefill_token / _BACKLOG_SECONDS, _MOST_STRETCH)
            seconds = (stretch - 1) * self._decode_step
        chunks = max(1, int(seconds / self._prefill_token / self._least_chunk))
        return min(most, chunks * self._least_chunk)


def _blend(old: float, new: float) -> float:
    return old + _BLEND * (new - old) if old else new
