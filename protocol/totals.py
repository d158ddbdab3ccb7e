"""Counters of an engine since its start; part of the result of the utility call `stats`."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

STEP_TOKENS: list[float] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
STEP_SECONDS: list[float] = [
    1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 2, 5, 10,
]  # fmt: skip


class Distribution(msgspec.Struct, gc=False):
    """Numbers of values in buckets, and their sum.

    Bucket `i` holds the values of at most `bounds[i]` that are above `bounds[i - 1]`; one more holds the rest, so
    `len(counts) == len(bounds) + 1`.
    """

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: list[float]) -> Distribution:
        """Return an empty distribution; `bounds` rise."""
        return cls([float(bound) for bound in bounds], [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: list[float]) -> None:
        """Count many values. This runs for every token: a bisection for each value, no lock."""
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)


class DraftTotals(msgspec.Struct, gc=False):
    """Speculative decoding: times that tokens were drafted for a sequence, drafted tokens, and those that held.

    `accepted_per_position[i]`: drafts number `i` of a sequence's that have held.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class EngineTotals(msgspec.Struct, gc=False):
    """Tokens that steps computed (prefill, including recomputation, and decode) and the seconds that they took.

    `prompt_tokens`: prompt tokens of admitted requests; `cached_tokens`: those of them found in the prefix cache.
    `step_tokens` and `step_seconds`: distributions over steps; drafted tokens do not count.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    update_seconds: float = 0.0
    speculation: DraftTotals = msgspec.field(default_factory=DraftTotals)
    step_tokens: Distribution = msgspec.field(default_factory=lambda: Distribution.of(STEP_TOKENS))
    step_seconds: Distribution = msgspec.field(default_factory=lambda: Distribution.of(STEP_SECONDS))
