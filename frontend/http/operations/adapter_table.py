"""The adapters of a model, for the page: which of them have open requests."""

from __future__ import annotations

import msgspec

from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.operations.table_feed import TableFeed, Updates

MAX_ROWS = 32  # adapters in a table


class AdapterRow(msgspec.Struct):
    """An adapter: its name, its path, and this server's open requests that name it."""

    name: str
    path: str
    requests: int


class AdapterTable(msgspec.Struct):
    """The adapters. Of many it has some, first those with open requests; `count` counts all."""

    adapters: list[AdapterRow]
    count: int


class AdapterTableFeed(TableFeed):
    """The table of a model's adapters. It has none of a model that has had none."""

    kind = "adapters"

    def __init__(self, model: ServedModel, updates: Updates) -> None:
        """Notify `updates` of each new table."""
        super().__init__(updates)
        self._model = model

    def has_rows(self) -> bool:
        """See `TableFeed`."""
        return len(self._model.adapters) > 0

    async def table(self) -> AdapterTable:
        """See `TableFeed`."""
        requests = self._model.metrics.adapter_requests()
        rows = [AdapterRow(each.lora_name, each.lora_path, requests[each.lora_name]) for each in self._model.adapters]
        if len(rows) > MAX_ROWS:
            rows.sort(key=lambda row: not row.requests)
        return AdapterTable(rows[:MAX_ROWS], len(rows))
