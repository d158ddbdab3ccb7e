"""The engine at one moment, for a person who looks at it. Made when asked for; the steps keep nothing for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.kernels.runner import Sequences
from quire.protocol.messages import BatchEntry, EngineSnapshot, HotPrefix, PageMap, WaitingEntry

if TYPE_CHECKING:
    from quire.engine_core.engine import EngineCore

MAX_BATCH = 256  # requests of the last step that are told of
MAX_WAITING = 16
MAX_PREFIXES = 16
MAX_CELLS = 4096


def take_snapshot(core: EngineCore) -> EngineSnapshot:
    """What `core` did last and what it has now. Of what grows with the pool, only C++ looks at all."""
    now, batch, scheduler, totals = core.clock(), core.last_batch, core.scheduler, core.totals
    snapshot = EngineSnapshot(
        timestamp=now,
        stats=core.stats,
        batch=list(islice(_batch_entries(batch), MAX_BATCH)),
        batch_size=len(batch.requests) + len(batch.searches),
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
    num_decodes = batch.num_decodes - sum(len(rows) for rows in batch.searches.values())
    for index, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=False)):  # then come the beams
        yield _batch_entry(request, count, in_prefill=index >= num_decodes)
    for request, rows in batch.searches.items():
        yield _batch_entry(request, len(rows), in_prefill=False)


def _batch_entry(request: Request, count: int, *, in_prefill: bool) -> BatchEntry:
    return BatchEntry(
        request.number,
        in_prefill,
        count,
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
