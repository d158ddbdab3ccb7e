"""Deliveries that wait for a consumer."""

from __future__ import annotations

from quire.frontend.client.engine_client import EngineAway, EngineBack
from quire.frontend.client.streams import DeliveryInbox, DeliveryQueue

AWAY, BACK = EngineAway("it died"), EngineBack(1)


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
