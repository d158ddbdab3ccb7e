"""Metric families as `prometheus_client` writes them out, with the prefix and labels that all of ours have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.protocol.totals import Distribution

_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

Labelled = Iterable[tuple[tuple[str, ...], float]]
"""Values by those of the labels."""


class Families(Collector):
    """Collects families; each name is `<prefix>:<name>`, each sample has the `common` labels first.

    Raises `ValueError` for a prefix that no metric can have.
    """

    def __init__(self, prefix: str, common: Mapping[str, str]) -> None:
        check_prefix(prefix)
        self._prefix = prefix
        self._names = list(common)
        self._values = list(common.values())
        self._families: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """All that has been added."""
        return iter(self._families)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """A value that rises and falls."""
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=[*self._names, *labels])
        family.add_metric([*self._values, *labels.values()], value)
        self._families.append(family)

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        """One for each value of `label`."""
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=[*self._names, label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        self._families.append(family)

    def counter(self, name: str, text: str, value: float) -> None:
        """A value that only rises; it is written as `<name>_total`."""
        self.counters(name, text, (), [((), value)])

    def counters(self, name: str, text: str, labels: tuple[str, ...], values: Labelled) -> None:
        """One for each combination of the labels' values."""
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=[*self._names, *labels])
        for keys, value in values:
            family.add_metric([*self._values, *keys], value)
        self._families.append(family)

    def histogram(self, name: str, text: str, distribution: Distribution, bounds: list[float] | None = None) -> None:
        """`bounds`: some of the distribution's, None for all."""
        self.histograms(name, text, (), [((), distribution)], bounds)

    def histograms(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], Distribution]],
        bounds: list[float] | None = None,
    ) -> None:
        """One for each combination of the labels' values."""
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=[*self._names, *labels])
        for keys, distribution in values:
            buckets = _buckets(distribution, distribution.bounds if bounds is None else bounds)
            family.add_metric([*self._values, *keys], buckets, distribution.sum)
        self._families.append(family)


def check_prefix(prefix: str) -> None:
    """Raises `ValueError` if no metric's name can begin with it."""
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(
            f"metrics_prefix={prefix!r} can't begin a metric's name; use letters, digits and _, such as quire or vllm"
        )


def _buckets(distribution: Distribution, bounds: list[float]) -> list[tuple[str, float]]:
    """How many values are at most each of `bounds`, and how many there are."""
    wanted = set(bounds)
    buckets: list[tuple[str, float]] = []
    count = 0
    for bound, more in zip(distribution.bounds, distribution.counts, strict=False):  # the last count has no bound
        count += more
        if bound in wanted:
            buckets.append((str(float(bound)), count))
    return [*buckets, ("+Inf", count + distribution.counts[-1])]
