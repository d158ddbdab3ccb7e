"""A snapshot of the engine for people. Made on request; the steps keep nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.kernels.runner import Sequences
from quire.protocol.messages import BatchEntry, EngineSnapshot, HotPrefix, PageMap, SchedulerStats, WaitingEntry
from quire.protocol.totals import EngineTotals

MAX_BATCH = 256  # requests of the last step
MAX_WAITING = 16
MAX_PREFIXES = 16
MAX_CELLS = 4096


class EngineState(Protocol):
    """The parts of `EngineCore` that snapshots and utility calls read."""

    clock: Callable[[], float]
    last_batch: Batch
    scheduler: Scheduler
    sequences: Sequences

    @property
    def stats(self) -> SchedulerStats:
        """Statistics as they are now."""

    @property
    def totals(self) -> EngineTotals:
        """Counts since the engine's start."""


def take_snapshot(core: EngineState) -> EngineSnapshot:
    """Return the last step and the current state. Only C++ looks at all of what grows with the pool."""
    now, batch, scheduler, totals = core.clock(), core.last_batch, core.scheduler, core.totals
    snapshot = EngineSnapshot(
        timestamp=now,
        stats=core.stats,
        batch=list(islice(_batch_entries(batch), MAX_BATCH)),
        batch_size=len(batch.requests),
        waiting=[_waiting_entry(request, now) for request in islice(scheduler.waiting, MAX_WAITING)],
        waiting_tokens=scheduler.waiting.num_tokens,
        page_map=_page_map(core.sequences, scheduler),
        prefixes=_prefixes(core.sequences),
        total_prefill_tokens=totals.prefill_tokens,
        total_decode_tokens=totals.decode_tokens,
    )
    snapshot.seconds = core.clock() - now
    return snapshot


def _batch_entries(batch: Batch) -> Iterator[BatchEntry]:
    for index, request in enumerate(batch.requests):
        yield BatchEntry(
            request.number,
            index >= batch.num_decode_requests,
            batch.num_tokens(index),
            request.num_computed_tokens,
            request.num_prompt_tokens,
            request.num_output_tokens,
        )


def _waiting_entry(request: Request, now: float) -> WaitingEntry:
    return WaitingEntry(request.number, request.num_prompt_tokens, now - request.arrival, request.status.name.lower())


def _page_map(sequences: Sequences, scheduler: Scheduler) -> PageMap:
    return PageMap(scheduler.limits.block_size, *sequences.page_map(scheduler.pins.slots, MAX_CELLS))


def _prefixes(sequences: Sequences) -> list[HotPrefix]:
    found = (HotPrefix(*fields) for fields in sequences.tree.hottest(MAX_PREFIXES))
    return [_without_tokens(prefix) if prefix.is_salted else prefix for prefix in found]


def _without_tokens(prefix: HotPrefix) -> HotPrefix:
    return HotPrefix(prefix.hits, prefix.pages, prefix.users, is_salted=True)
