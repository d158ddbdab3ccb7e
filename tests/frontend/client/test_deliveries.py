"""Deliveries that wait for a consumer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.frontend.client import streams
from quire.frontend.client.engine_client import EngineAway, EngineBack
from quire.frontend.client.routing import Session
from quire.frontend.client.streams import DeliveryInbox, DeliveryQueue, RequestStreams
from quire.frontend.errors import EngineDeadError
from quire.frontend.turns import SLICE_SECONDS
from quire.protocol.messages import EngineCoreOutput, EngineCoreOutputs

AWAY, BACK = EngineAway("it died"), EngineBack(Session(0, 1))


def test_repeated_notices_that_nobody_reads_are_one() -> None:
    inbox, waiting = DeliveryInbox(), DeliveryQueue()
    for _ in range(2):
        for _ in range(100):
            inbox.put(AWAY)
            waiting.put(AWAY)
        inbox.put(BACK)
        waiting.put(BACK)
    expected = [AWAY, BACK, AWAY, BACK]
    assert waiting.take() == expected
    taken = []
    while not inbox.empty():
        taken.append(inbox.get())
    assert taken == expected


def test_a_notice_comes_again_once_the_one_before_was_read() -> None:
    inbox, waiting = DeliveryInbox(), DeliveryQueue()
    for _ in range(2):
        inbox.put(AWAY)
        assert inbox.get() == AWAY
        waiting.put(AWAY)
        assert waiting.take() == [AWAY]


class SlowTable:
    """A table that takes a slice for each update, on a clock of its own, and notes the turns of the loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turn = 0
        self.taken: list[tuple[str, int]] = []  # what it got, and in which turn

    def monotonic(self) -> float:
        return self.now

    def update(self, message: EngineCoreOutputs) -> list[Any]:
        self.now += SLICE_SECONDS
        self.taken += [(output.request_id, self.turn) for output in message.outputs]
        return []

    def suspend(self, _reason: str, _engine: int, *, is_loss: bool) -> list[Any]:
        assert is_loss
        self.taken.append(("away", self.turn))
        return []

    def end(self, _error: EngineDeadError) -> list[Any]:
        self.taken.append(("dead", self.turn))
        return []


def test_much_that_arrives_at_once_is_applied_in_turns_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    table: Any = SlowTable()
    monkeypatch.setattr(streams, "time", table)
    names = [str(number) for number in range(200)]

    async def main() -> None:
        deliveries = DeliveryQueue()
        deliveries.bind(asyncio.get_running_loop(), RequestStreams(deliveries, table)._on_deliveries)
        deliveries.put(EngineCoreOutputs([EngineCoreOutput(name) for name in names]))
        deliveries.put(AWAY)
        for table.turn in range(100):
            if table.turn == 5:
                deliveries.put(EngineDeadError("it was closed"))
            await asyncio.sleep(0)

    asyncio.run(main())
    assert [name for name, _ in table.taken] == [*names, "away", "dead"]
    turns = [turn for _, turn in table.taken]
    assert turns == sorted(turns)
    assert max(map(turns.count, turns)) <= 18  # a part, and notices
