"""What was measured, and what follows from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.engines import Engine
from bench.work import Answer, Decode, Work

TOGETHER = 0.9  # least part of a decode's time in which all its sequences should run


@dataclass
class Samples:
    """The answers of one engine to one work, one a repetition."""

    work: Work
    engine: Engine
    answers: list[Answer] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens a second."""
        return [self.work.rate(answer) for answer in self.answers]

    @property
    def median(self) -> float:
        """The median rate."""
        return statistics.median(self.rates)

    @property
    def apart(self) -> bool:
        """Whether sequences ended so much before others that the rate is not that of the whole batch."""
        return min(map(self.work.together, self.answers)) < TOGETHER

    def ratio_to(self, other: Samples) -> float:
        """The median, over the repetitions, of this rate to the other's: what drifts from turn to turn cancels."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.rates, other.rates, strict=True))


@dataclass
class WorkSamples:
    """All that was measured for one work: samples of each engine, and bytes a second of reading in the same turns."""

    work: Work
    engines: list[Samples]
    bandwidths: list[float] = field(default_factory=list)

    def best(self) -> list[Samples]:
        """The samples of each engine, in order: where it has variants, of the fastest."""
        fastest: dict[str, Samples] = {}
        for samples in self.engines:
            known = fastest.get(samples.engine.name)
            if known is None or samples.median > known.median:
                fastest[samples.engine.name] = samples
        return list(fastest.values())

    def limit(self, engine: Engine) -> float | None:
        """Tokens a second if steps took no longer than reading their weights and KV; None for a prefill."""
        if not isinstance(self.work, Decode):
            return None
        return self.work.batch * statistics.median(self.bandwidths) / engine.step_bytes(self.work)


def as_json(results: list[WorkSamples]) -> list[dict[str, Any]]:
    """All samples, one entry for each work and engine."""
    entries = []
    for result in results:
        for samples in result.engines:
            entry: dict[str, Any] = {
                "work": result.work.name,
                "batch": result.work.batch,
                "context": result.work.context,
                "engine": samples.engine.name,
                "variant": samples.engine.variant,
                "median": samples.median,
                "tokens_per_second": samples.rates,
                "seconds": [answer.seconds for answer in samples.answers],
            }
            if isinstance(result.work, Decode):
                entry |= {
                    "length": result.work.length,
                    "together": [result.work.together(answer) for answer in samples.answers],
                    "step_bytes": samples.engine.step_bytes(result.work),
                    "bandwidth": result.bandwidths,
                    "limit": result.limit(samples.engine),
                }
            entries.append(entry)
    return entries
