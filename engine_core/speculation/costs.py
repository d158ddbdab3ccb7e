"""What drafts cost a step, learned from measured steps, and how probable they must be to pay."""

from __future__ import annotations

import math
from dataclasses import dataclass

_BLEND = 0.1  # weight of a new measurement
_PLAIN_EVERY = 64  # steps with drafts, after which one without measures what these cost
_ROWS_AT_NO_COST = 16  # before anything is measured: rows that take as long as one, about
_FORGET = 1 / 256  # of what drafts seem to cost, with each step without: bad measurements do not last


@dataclass(slots=True)
class _Steps:
    """Steps of about the same number of decoding sequences."""

    plain_seconds: float = 0.0  # of a step without drafts
    draft_seconds: float = 0.0  # that a draft adds
    token_rate: float = 0.0  # tokens a second, with the drafts that have held
    since_plain: int = 0  # steps with drafts since the last one without


class DraftCosts:
    """Learns how long steps with and without drafts take, by the number of sequences that decode.

    A draft that holds with probability p adds p tokens and takes some seconds. It pays if these tokens a second are
    more than the step gives without it.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}

    def least_probability(self, num_decodes: int, seconds: float = 0.0) -> float:
        """Return the probability at which a draft pays that takes `seconds` before it is computed; inf for none."""
        steps = self._of(num_decodes)
        if not steps.plain_seconds or steps.since_plain >= _PLAIN_EVERY:
            return math.inf
        return (steps.draft_seconds + seconds) * steps.token_rate

    def learn(self, num_decodes: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step without prompts that has given `num_tokens` tokens."""
        steps = self._of(num_decodes)
        if seconds <= 0:
            return
        steps.token_rate = _blend(steps.token_rate, num_tokens / seconds)
        if num_drafts:
            steps.since_plain += 1
            cost = max(seconds - steps.plain_seconds, 0.0) / num_drafts
            steps.draft_seconds = _blend(steps.draft_seconds, cost)
            return
        likely = seconds / (num_decodes + _ROWS_AT_NO_COST)
        if steps.plain_seconds:
            steps.draft_seconds += _FORGET * (likely - steps.draft_seconds)
        else:
            steps.draft_seconds = likely
        steps.plain_seconds = _blend(steps.plain_seconds, seconds)
        steps.since_plain = 0

    def _of(self, num_decodes: int) -> _Steps:
        return self._steps.setdefault(round(4 * math.log2(max(num_decodes, 1))), _Steps())


def _blend(old: float, new: float) -> float:
    """Return the moving average; a step that happens to take many times as long as it should hardly counts."""
    return old + _BLEND * (min(new, 2 * old) - old) if old else new
