"""Metrics of a server, parsed with the Prometheus parser."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

__all__ = ["ParsedMetrics", "parse_open_metrics", "parse_text"]

Parse = Callable[[str], Iterable[Metric]]


class ParsedMetrics:
    """Families by name, and samples by name and labels."""

    def __init__(self, page: bytes, parse: Parse = parse_text) -> None:
        self.families = {family.name: family for family in parse(page.decode())}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, name: str) -> float:
        """Return the only sample of this name."""
        [value] = [value for (each, _), value in self._samples.items() if each == name]
        return value

    def get(self, name: str, **labels: str) -> float:
        """Return the sample with these labels, among others."""
        [value] = [
            value
            for (each, pairs), value in self._samples.items()
            if each == name and labels.items() <= dict(pairs).items()
        ]
        return value

    def labels(self, family: str) -> set[str]:
        """Return the label names of the samples of a family."""
        return {name for sample in self.families[family].samples for name in sample.labels}

    def bounds(self, family: str) -> list[float]:
        """Return the bounds of a histogram."""
        found = [float(sample.labels["le"]) for sample in self.families[family].samples if "le" in sample.labels]
        return list(dict.fromkeys(found))

    def counts(self, family: str) -> list[float]:
        """Return the cumulative counts of a histogram without labels of its own."""
        return [sample.value for sample in self.families[family].samples if "le" in sample.labels]
