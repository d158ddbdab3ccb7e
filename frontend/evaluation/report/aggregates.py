"""Aggregates of a run's requests: a downsampled series, totals by engine, and columns with every request's figures."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.frontend.evaluation.replay.record import RequestRecord

Item = TypeVar("Item")


class Downsampled(Generic[Item]):
    """The items whose index is a multiple of `every`, which doubles whenever there are more than `limit`.

    The selection depends on the indices alone, not on the order in which items are added.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.every = 1
        self._kept: dict[int, Item] = {}

    def wants(self, index: int) -> bool:
        """Return True if an item with this index would be kept, and so is worth making."""
        return index % self.every == 0

    def add(self, index: int, item: Item) -> None:
        """Keep or drop the item."""
        if not self.wants(index):
            return
        self._kept[index] = item
        while len(self._kept) > self._limit:
            self.every *= 2
            self._kept = {index: item for index, item in self._kept.items() if self.wants(index)}

    def items(self) -> list[tuple[int, Item]]:
        """Return the kept items with their indices, in the order of the indices."""
        return sorted(self._kept.items(), key=lambda pair: pair[0])


@dataclass
class EngineShare:
    """Requests that were sent to an engine, however they ended, and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens or 0
        self.output_tokens += record.output_tokens


class RequestColumns:
    """Lengths, times in seconds and error of every request, under the names of vLLM's `--save-detailed`."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, dict[str, Any]]] = []

    def add(self, record: RequestRecord) -> None:
        """Keep a request's figures."""
        row = {
            "input_lens": record.prompt_tokens,
            "output_lens": record.output_tokens,
            "ttfts": record.ttft or 0.0,
            "itls": array("d", record.gaps),
            "latencies": record.e2e or 0.0,
            "start_times": record.sent,
            "errors": record.error or "",
            "outcomes": record.outcome.value,
        }
        self._rows.append((record.index, row))

    def columns(self) -> dict[str, list[Any]]:
        """Return a list for each name, in the order of the workload."""
        rows = [row for _, row in sorted(self._rows, key=lambda pair: pair[0])]
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
        if rows:
            columns["itls"] = [gaps.tolist() for gaps in columns["itls"]]
        return columns
