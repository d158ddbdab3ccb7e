"""The engines of a set side by side, for the page: what each of them does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.engine_set import EngineStatus
from quire.frontend.http.operations.table_feed import TableFeed, Updates

_LONGEST_INTERVAL = 10.0  # seconds over which a rate says what an engine does now
_PATIENCE = 1.0  # seconds for which an engine's answer is waited for


class EngineRow(msgspec.Struct):
    """An engine of the set.

    `state`: ready, draining or away. `requests`: those of this server; `losses`: times that it was lost; `prefill`: it
    computes prompts for the others. What follows is of all its clients, None if it is not known: `kv_usage` is the
    share of KV pages that requests hold, and `tokens_per_second` counts prefill and decode tokens since the table
    before.
    """

    number: int
    state: str
    requests: int
    losses: int
    prefill: bool = False
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    tokens_per_second: float | None = None


class EngineTable(msgspec.Struct):
    """The engines, and the router that chooses among them."""

    router: str
    engines: list[EngineRow]


class _Look(NamedTuple):
    """An engine's statistics, and when it was asked for them."""

    time: float
    stats: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        totals = self.stats["totals"]
        return int(totals["prefill_tokens"] + totals["decode_tokens"])


class EngineTableFeed(TableFeed):
    """The table of a set of engines. It has none of a set that has only ever had one engine.

    The statistics of an engine that does not answer in time, since it is busy with a step, stay as they were.
    """

    kind = "engines"

    def __init__(self, llm: AsyncLLM, updates: Updates) -> None:
        """Notify `updates` of each new table."""
        super().__init__(updates)
        self._llm = llm
        self._looks: dict[int, _Look] = {}
        self._rates: dict[int, float] = {}

    def has_rows(self) -> bool:
        """See `TableFeed`."""
        return len(self._llm.engines()) > 1

    async def table(self) -> EngineTable:
        """See `TableFeed`."""
        await self._look()
        return EngineTable(self._llm.router, self._rows())

    async def _look(self) -> None:
        asked = time.monotonic()
        try:
            answers = await self._llm.engine_stats(_PATIENCE)
        except (RuntimeError, TimeoutError):  # none is there, or all are busy
            return
        for number, stats in answers.items():
            look, before = _Look(asked, stats), self._looks.get(number)
            self._looks[number] = look
            self._rates.pop(number, None)
            if before is not None and (seconds := look.time - before.time) < _LONGEST_INTERVAL:
                tokens = look.num_tokens - before.num_tokens
                self._rates[number] = max(0, tokens) / seconds  # an engine that was started again counts from zero

    def _rows(self) -> list[EngineRow]:
        engines, requests = self._llm.engines(), self._llm.num_requests() + self._llm.num_prefills()
        there = {engine.number for engine in engines if engine.state != "away"}
        self._looks = {number: look for number, look in self._looks.items() if number in there}
        self._rates = {number: rate for number, rate in self._rates.items() if number in there}
        return [self._row(engine, requests[engine.number]) for engine in engines]

    def _row(self, engine: EngineStatus, num_requests: int) -> EngineRow:
        row = EngineRow(engine.number, engine.state, num_requests, engine.num_losses, engine.is_prefill)
        if (look := self._looks.get(engine.number)) is not None:
            row.running, row.waiting = look.stats["running"], look.stats["waiting"]
            row.kv_usage = round(look.stats["pages_held"] / look.stats["pages_total"], 3)
        if (rate := self._rates.get(engine.number)) is not None:
            row.tokens_per_second = round(rate, 1)
        return row
