"""The table of a set of engines, of engines that answer as a test says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, cast

from patience import PATIENCE

from quire.frontend import AsyncLLM
from quire.frontend.client.engine_set import EngineState, EngineStatus
from quire.frontend.http.operations.engine_table import EngineTableFeed
from quire.frontend.http.operations.table_feed import Updates
from quire.protocol.messages import Ready


class Engines:
    """What the feed asks a client for; `answers` has the statistics of the engines that answer."""

    router = "round-robin"

    def __init__(self, *states: EngineState) -> None:
        self.states = list(states)
        self.answers: dict[int, dict[str, Any]] = {}

    def engines(self) -> list[EngineStatus]:
        """See `AsyncLLM`."""
        ready = cast("Ready", None)
        return [EngineStatus(number, "", state, False, 0, ready) for number, state in enumerate(self.states)]

    def num_prefills(self) -> Counter[int]:
        return Counter()

    def num_requests(self) -> Counter[int]:
        """See `AsyncLLM`."""
        return Counter({0: 3})

    async def engine_stats(self, timeout: float) -> dict[int, dict[str, Any]]:  # noqa: ASYNC109 - AsyncLLM's
        """See `AsyncLLM`."""
        if not self.answers:
            raise TimeoutError
        return dict(self.answers)


def stats(running: int, tokens: int = 0) -> dict[str, Any]:
    totals = {"prefill_tokens": 0, "decode_tokens": tokens}
    return {"running": running, "waiting": 1, "pages_held": 1, "pages_total": 4, "totals": totals}


class Viewer:
    """A viewer of the table of some engines."""

    def __init__(self, engines: Engines) -> None:
        self.updates = Updates()
        self.feed = EngineTableFeed(cast("AsyncLLM", engines), self.updates)

    def __enter__(self) -> Viewer:
        self.feed.join()
        return self

    def __exit__(self, *_error: object) -> None:
        self.feed.leave()

    async def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the next table."""
        await asyncio.wait_for(self.updates.next.wait(), PATIENCE)
        kind, data, *_ = self.feed.event.decode().split("\n")
        assert kind == "event: engines"
        table = json.loads(data.removeprefix("data: "))
        assert table["router"] == "round-robin"
        return list(table["engines"])


def test_a_busy_engine_keeps_its_row_and_one_that_is_away_has_none() -> None:
    async def main() -> None:
        engines = Engines("ready", "draining")
        engines.answers = {0: stats(5), 1: stats(6)}
        with Viewer(engines) as viewer:
            first, second = await viewer.rows()
            assert first == {
                "number": 0, "state": "ready", "requests": 3, "losses": 0, "prefill": False, "running": 5, "waiting": 1,
                "kv_usage": 0.25, "tokens_per_second": None,
            }  # fmt: skip
            assert (second["state"], second["requests"], second["running"]) == ("draining", 0, 6)
            engines.answers = {0: stats(4, tokens=100)}
            first, second = await viewer.rows()
            assert (first["running"], second["running"]) == (4, 6)
            assert 0 < first["tokens_per_second"] <= 200  # looks are half a second apart, or more on a busy machine
            engines.answers = {}
            engines.states[1] = "away"
            first, second = await viewer.rows()
            assert (first["running"], second["running"], second["kv_usage"]) == (4, None, None)

    asyncio.run(main())


def test_an_engine_that_has_been_started_again_has_no_negative_rate() -> None:
    async def main() -> None:
        engines = Engines("ready", "ready")
        engines.answers = {0: stats(5, tokens=1000)}
        with Viewer(engines) as viewer:
            await viewer.rows()
            engines.answers = {0: stats(5, tokens=10)}
            first, _ = await viewer.rows()
            assert first["tokens_per_second"] == 0

    asyncio.run(main())


def test_there_is_a_table_once_there_are_several_engines() -> None:
    async def main() -> None:
        engines = Engines("ready")
        engines.answers = {0: stats(5), 1: stats(6)}
        with Viewer(engines) as viewer:
            for _ in range(3):
                await asyncio.sleep(0)
            assert not viewer.feed.event
            engines.states.append("ready")
            assert len(await viewer.rows()) == 2
            engines.states.pop()
            assert len(await viewer.rows()) == 1  # so that viewers learn of it

    asyncio.run(main())
