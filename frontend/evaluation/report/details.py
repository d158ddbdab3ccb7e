"""What `--save-detailed` adds: every request's own figures."""

from __future__ import annotations

from array import array
from typing import Any

from quire.frontend.evaluation.replay.record import RequestRecord


class Details:
    """Keeps the lengths, times and error of every request, under the names of vLLM's --save-detailed; seconds."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, dict[str, Any]]] = []

    def add(self, record: RequestRecord) -> None:
        """Keep a request's."""
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
        """A list for each name, in the order of the workload."""
        rows = [row for _, row in sorted(self._rows, key=lambda pair: pair[0])]
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
        if rows:
            columns["itls"] = [gaps.tolist() for gaps in columns["itls"]]
        return columns
