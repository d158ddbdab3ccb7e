"""The metrics of an `LLM` as values, in the classes of vLLM's `get_metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from quire.frontend.hub.names import name_of
from quire.frontend.metrics.engine import add_configuration, add_engine
from quire.frontend.metrics.prometheus import Families
from quire.frontend.metrics.requests import RequestMeter
from quire.protocol.messages import Ready

_VECTORS = {"spec_decode_num_accepted_tokens_per_pos": "position"}  # name and the label that numbers the values


class Metric(msgspec.Struct, gc=False):
    """A metric: its name, such as `vllm:num_requests_running`, and its labels."""

    name: str
    labels: dict[str, str]


class Counter(Metric, gc=False):
    """A number that only grows; a whole one, unless it counts seconds."""

    value: float


class Gauge(Metric, gc=False):
    """A number that grows and shrinks."""

    value: float


class CounterVector(Metric, gc=False):
    """A counter for each of several positions."""

    values: list[int]


class Histogram(Metric, gc=False):
    """Observations: their number and sum, and how many are at most each upper bound, the last `+Inf`."""

    count: int
    sum: float
    buckets: dict[str, int]


Vector = CounterVector  # vLLM's name


def read_metrics(ready: Ready, stats: Mapping[str, Any], meter: RequestMeter, prefix: str) -> list[Metric]:
    """Return the metrics of an engine by its description and statistics, and of the requests that `meter` has seen."""
    families = Families(prefix, {"model_name": name_of(ready.model), "engine": "0"})
    add_configuration(families, ready)
    add_engine(families, stats)
    meter.add_to(families)
    meter.adapters.add_to(families, ready.adapters)
    return [metric for family in families.collect() for metric in _read(family)]


def _read(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family.name, family.samples)
    elif family.type == "gauge":
        yield from (Gauge(family.name, dict(sample.labels), sample.value) for sample in family.samples)
    elif (label := _VECTORS.get(family.name.partition(":")[2])) is not None:
        if family.samples:
            labels = {name: value for name, value in family.samples[0].labels.items() if name != label}
            yield CounterVector(family.name, labels, [int(sample.value) for sample in family.samples])
    else:
        yield from (Counter(family.name, dict(sample.labels), _whole(sample.value)) for sample in family.samples)


def _histograms(name: str, samples: Iterable[Sample]) -> Iterator[Histogram]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in samples:
        labels = {label: value for label, value in sample.labels.items() if label != "le"}
        histogram = found.setdefault(tuple(labels.items()), Histogram(name, labels, 0, 0.0, {}))
        if sample.name.endswith("_sum"):
            histogram.sum = sample.value
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        else:
            histogram.buckets[sample.labels["le"]] = int(sample.value)
    yield from found.values()


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value
