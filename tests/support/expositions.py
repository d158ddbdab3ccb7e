"""What a page of metrics says, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

__all__ = ["Exposition", "parse_open_metrics", "parse_text"]

Parse = Callable[[str], Iterable[Metric]]


class Exposition:
    """The families by name, and the samples by name and labels; the labels that all have are left out of these."""

    def __init__(self, page: bytes, parse: Parse = parse_text) -> None:
        self.families = {family.name: family for family in parse(page.decode())}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, name: str) -> float:
        """The one sample of that name, whatever its labels."""
        [value] = [value for (each, _), value in self._samples.items() if each == name]
        return value

    def get(self, name: str, **labels: str) -> float:
        """The sample with these labels; those that all have may be left out."""
        [value] = [
            value
            for (each, pairs), value in self._samples.items()
            if each == name and labels.items() <= dict(pairs).items()
        ]
        return value

    def labels(self, family: str) -> set[str]:
        """The names of the labels that the samples of a family have."""
        return {name for sample in self.families[family].samples for name in sample.labels}

    def bounds(self, family: str) -> list[float]:
        """Of a histogram."""
        found = [float(sample.labels["le"]) for sample in self.families[family].samples if "le" in sample.labels]
        return list(dict.fromkeys(found))

    def counts(self, family: str) -> list[float]:
        """Of a histogram without labels of its own: how many are at most each of the bounds."""
        return [sample.value for sample in self.families[family].samples if "le" in sample.labels]
