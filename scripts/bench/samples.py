"""Samples of the measurements, and statistics of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.engines import BenchEngine
from bench.work import BatchTiming, Decode, Work


@dataclass
class Samples:
    """Timings of one engine for one work, one for each repetition."""

    work: Work
    engine: BenchEngine
    timings: list[BatchTiming] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second."""
        return [self.work.rate(timing) for timing in self.timings]

    @property
    def median(self) -> float:
        """Median rate."""
        return statistics.median(self.rates)

    def ratio_to(self, other: Samples) -> float:
        """Return the median ratio to the other's rates, repetition by repetition: drift from turn to turn cancels."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.rates, other.rates, strict=True))


@dataclass
class WorkSamples:
    """Samples of each engine for one work, and the read bandwidth in bytes per second in the same turns."""

    work: Work
    engines: list[Samples]
    bandwidths: list[float] = field(default_factory=list)

    def best(self) -> list[Samples]:
        """Return the samples of each engine in order, those of its fastest variant."""
        fastest: dict[str, Samples] = {}
        for samples in self.engines:
            known = fastest.get(samples.engine.name)
            if known is None or samples.median > known.median:
                fastest[samples.engine.name] = samples
        return list(fastest.values())

    def limit(self, engine: BenchEngine) -> float | None:
        """Return the tokens per second of steps that only read their weights and KV from the host's memory; None for a
        prefill, or on a GPU."""
        if engine.on_gpu or not isinstance(self.work, Decode):
            return None
        return self.work.batch * statistics.median(self.bandwidths) / engine.step_bytes(self.work)


def as_json(results: list[WorkSamples]) -> list[dict[str, Any]]:
    """Return all samples, one entry for each work and engine."""
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
                "seconds": [timing.seconds for timing in samples.timings],
            }
            if isinstance(result.work, Decode):
                entry |= {
                    "length": result.work.length,
                    "share": [timing.share for timing in samples.timings],
                    "step_bytes": samples.engine.step_bytes(result.work),
                    "bandwidth": result.bandwidths,
                    "limit": result.limit(samples.engine),
                }
            entries.append(entry)
    return entries
