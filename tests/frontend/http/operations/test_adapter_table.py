"""The table of many adapters, of which a part is sent."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from quire.frontend.http.models.adapters import ServedAdapters
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.operations.adapter_table import MAX_ROWS, AdapterTableFeed
from quire.frontend.http.operations.table_feed import Updates


def test_of_many_adapters_those_with_open_requests_come_first() -> None:
    names = [f"a{number}" for number in range(MAX_ROWS + 9)]
    requests = Counter({names[-1]: 2})
    metrics = SimpleNamespace(adapter_requests=lambda: requests)
    adapters = ServedAdapters({name: f"/{name}" for name in names})
    model = cast("ServedModel", SimpleNamespace(adapters=adapters, metrics=metrics))

    async def shown() -> Any:
        updates = Updates()
        feed, updated = AdapterTableFeed(model, updates), updates.next
        feed.join()
        await updated.wait()
        feed.leave()
        return json.loads(feed.event.decode().split("data: ")[1])

    table = asyncio.run(shown())
    assert (len(table["adapters"]), table["count"]) == (MAX_ROWS, len(names))
    assert table["adapters"][:2] == [
        {"name": names[-1], "path": f"/{names[-1]}", "requests": 2},
        {"name": "a0", "path": "/a0", "requests": 0},
    ]
