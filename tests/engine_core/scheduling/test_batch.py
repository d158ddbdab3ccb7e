"""The order of rows in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.engine_core.scheduling.batch import Batch, RunningRequests


def test_rows_of_one_adapter_follow_one_another() -> None:
    adapters = [2, 0, 1, 2, 1, 0]
    requests: list[Any] = [
        SimpleNamespace(slot=slot, adapter=adapter, num_tokens=10 * slot + 1) for slot, adapter in enumerate(adapters)
    ]
    running, batch = RunningRequests(decodes=requests[:], prefills=[]), Batch()
    batch.fill(running, [])
    assert batch.step.slots == [1, 5, 2, 4, 0, 3]
    assert batch.step.starts == [10, 50, 20, 40, 0, 30]
    assert [request.slot for request in batch.requests] == batch.step.slots
    assert running.decodes == requests
