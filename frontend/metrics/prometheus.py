"""Prometheus: metric families with our prefix and labels, the bounds of histograms, and the two exposition formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from quire.protocol.totals import Distribution

# Upper bounds of histogram buckets, in seconds or counts. Those without FINE in their name are vLLM's, so that its
# dashboards and alerts work. A small model on a fast host answers within the first of them, hence the finer ones.
TIME_TO_FIRST_TOKEN: list[float] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
]  # fmt: skip

TIME_PER_TOKEN: list[float] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
]  # fmt: skip

REQUEST_TIME: list[float] = [
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
]  # fmt: skip

NUM_COMPLETIONS: list[float] = [1, 2, 5, 10, 20]

NUM_PREEMPTIONS: list[float] = [1, 2, 3, 4, 5, 10, 20]

HTTP_TIME: list[float] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
]  # fmt: skip

_FROM_A_TENTH_OF_A_MILLISECOND: list[float] = [
    0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1,
]  # fmt: skip


def _finer(bounds: list[float]) -> list[float]:
    """Add bounds from 0.1 ms on; those of `bounds` are kept, so that one distribution serves both histograms."""
    return sorted({*_FROM_A_TENTH_OF_A_MILLISECOND, *bounds})


TIME_PER_TOKEN_FINE = _finer(TIME_PER_TOKEN)

REQUEST_TIME_FINE = _finer(REQUEST_TIME)

_OPEN_METRICS = "application/openmetrics-text"
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)

Labeled = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of label values and the sample's value."""


def one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return bounds
            bounds.append(digit * scale)
        scale *= 10


class Families(Collector):
    """A collection of families; each name is `<prefix>:<name>`, each sample begins with the `common` labels.

    Raises `ValueError` for a prefix that is invalid in metric names.
    """

    def __init__(self, prefix: str, common: Mapping[str, str]) -> None:
        check_prefix(prefix)
        self._prefix = prefix
        self._common = dict(common)
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterator[Metric]:
        """Return the families added so far."""
        return iter(self._families.values())

    @contextmanager
    def labelled(self, **labels: str) -> Iterator[None]:
        """Have samples that are added within the `with` begin with other values of common labels."""
        before, self._common = self._common, {**self._common, **labels}
        try:
            yield
        finally:
            self._common = before

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """Add a gauge."""
        self._family(GaugeMetricFamily, name, text, labels).add_metric([*self._values, *labels.values()], value)

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        """Add a gauge for each value of `label`."""
        family = self._family(GaugeMetricFamily, name, text, [label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value)

    def counter(self, name: str, text: str, value: float) -> None:
        """Add a counter, which is written as `<name>_total`."""
        self.counters(name, text, (), [((), value)])

    def counters(self, name: str, text: str, labels: tuple[str, ...], values: Labeled) -> None:
        """Add a counter for each combination of label values."""
        family = self._family(CounterMetricFamily, name, text, labels)
        for keys, value in values:
            family.add_metric([*self._values, *keys], value)

    def histogram(self, name: str, text: str, distribution: Distribution, bounds: list[float] | None = None) -> None:
        """Add a histogram with some `bounds` of the distribution, None for all."""
        self.histograms(name, text, (), [((), distribution)], bounds)

    def histograms(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], Distribution]],
        bounds: list[float] | None = None,
    ) -> None:
        """Add a histogram for each combination of label values."""
        family = self._family(HistogramMetricFamily, name, text, labels)
        for keys, distribution in values:
            buckets = _buckets(distribution, distribution.bounds if bounds is None else bounds)
            family.add_metric([*self._values, *keys], buckets, distribution.sum)

    @property
    def _values(self) -> list[str]:
        return list(self._common.values())

    def _family(self, kind: type[F], name: str, text: str, labels: Iterable[str]) -> F:
        """Return the family of a name, a new one unless samples with other labels have been added to it."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(f"{self._prefix}:{name}", text, labels=[*self._common, *labels])
        return cast("F", family)


class MergedFamilies(Collector):
    """Families of the same names, such as those of several models, as one family each. Their labels differ."""

    def __init__(self, collections: Iterable[Families]) -> None:
        self._families: dict[str, Metric] = {}
        for collection in collections:
            for family in collection.collect():
                if (known := self._families.setdefault(family.name, family)) is not family:
                    known.samples += family.samples

    def collect(self) -> Iterator[Metric]:
        """Return the families."""
        return iter(self._families.values())


def check_prefix(prefix: str) -> None:
    """Raise `ValueError` if `prefix` is invalid in metric names."""
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(
            f"metrics_prefix={prefix!r} is invalid in a metric's name; use letters, digits and _, such as quire or vllm"
        )


def _buckets(distribution: Distribution, bounds: list[float]) -> list[tuple[str, float]]:
    """Return the cumulative count of each of `bounds`, and the total count."""
    wanted = set(bounds)
    buckets: list[tuple[str, float]] = []
    count = 0
    for bound, more in zip(distribution.bounds, distribution.counts, strict=False):  # the last count has no bound
        count += more
        if bound in wanted:
            buckets.append((str(float(bound)), count))
    return [*buckets, ("+Inf", count + distribution.counts[-1])]


def encode(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics if the `Accept` header names it, else text.

    `prometheus_client.exposition.choose_encoder` is not used: its OpenMetrics drop the colon after the prefix.
    """
    kinds = {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}
    if _OPEN_METRICS not in kinds:
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    # None of our names needs escaping, and this kind of escaping keeps colons.
    text: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text, f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8"
