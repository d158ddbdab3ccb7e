"""The engine's statistics, which go out after each step, and its snapshot for people, which is made on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from quire.engine_core.feature import Feature
from quire.engine_core.host import EngineHost
from quire.engine_core.kv_tiers.tier import KvTier
from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    BatchEntry,
    EngineSnapshot,
    HotPrefix,
    PageMap,
    PrefixRun,
    PrefixTree,
    SchedulerStats,
    WaitingEntry,
)
from quire.protocol.totals import EngineTotals

MAX_BATCH = 256  # requests of the last step
MAX_WAITING = 16
MAX_PREFIXES = 16
MAX_CELLS = 4096
MAX_RUNS = 256  # of the prefix tree
RUN_TOKENS = 32  # shown of a run's first page and of its last
_LEVELS = 2
_BRANCHES = 8


class EngineState(Protocol):
    """The parts of `EngineCore` that snapshots and utility calls use."""

    clock: Callable[[], float]
    last_batch: Batch
    limits: EngineShape
    features: Sequence[Feature]
    scheduler: Scheduler
    sequences: Sequences
    host: EngineHost
    tiers: Sequence[KvTier]

    @property
    def stats(self) -> SchedulerStats:
        """Statistics as they are now."""

    @property
    def totals(self) -> EngineTotals:
        """Counts since the engine's start."""

    def drain(self) -> None:
        """Reject new requests from now on."""


def collect_stats(last: SchedulerStats, scheduler: Scheduler, sequences: Sequences) -> SchedulerStats:
    """Return queues, pages and states as they are now, with the tokens and times of the last step."""
    states = sequences.states
    return msgspec.structs.replace(
        last,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preemptions=scheduler.counters.preemptions,
        evictions=sequences.tree.num_evicted,
        wasted_tokens=scheduler.counters.wasted_tokens,
        pages_free=sequences.free_pages,
        pages_cached=sequences.cached_pages,
        pages_held=sequences.held_pages,
        pages_total=scheduler.limits.num_pages,
        states_free=0 if states is None else states.free_records,
        states_cached=0 if states is None else states.cached_records,
        states_held=0 if states is None else states.held_records,
        states_total=0 if states is None else states.total,
        state_evictions=0 if states is None else states.num_evicted,
    )


def add_step(totals: EngineTotals, last: SchedulerStats) -> None:
    """Add a step to the totals."""
    totals.prefill_tokens += last.prefill_tokens
    totals.decode_tokens += last.decode_tokens
    totals.schedule_seconds += last.schedule_seconds
    totals.execute_seconds += last.execute_seconds
    totals.update_seconds += last.update_seconds
    totals.step_tokens.observe(last.prefill_tokens + last.decode_tokens)
    totals.step_seconds.observe(last.schedule_seconds + last.execute_seconds + last.update_seconds)


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
        total_decode_tokens=totals.decode_tokens + totals.speculation.accepted_tokens,
        total_draft_tokens=totals.speculation.draft_tokens,
        total_accepted_tokens=totals.speculation.accepted_tokens,
    )
    snapshot.seconds = core.clock() - now
    return snapshot


def take_prefix_tree(core: EngineState, shown: Mapping[int, int]) -> PrefixTree:
    """Return the upper levels of the prefix cache and the branches of `shown`. Only C++ looks at the whole of it."""
    now = core.clock()
    found = core.sequences.outline(
        core.scheduler.pins.slots, max_runs=MAX_RUNS, levels=_LEVELS, branches=_BRANCHES, shown=shown
    )
    runs = [PrefixRun(*fields) for fields in found]
    for run in runs:
        run.first_token_ids = run.first_token_ids[:RUN_TOKENS]
        run.last_token_ids = run.last_token_ids[:RUN_TOKENS]
    return PrefixTree(core.limits.block_size, runs, core.clock() - now)


def _batch_entries(batch: Batch) -> Iterator[BatchEntry]:
    for index, request in enumerate(batch.requests):
        row = batch.rows[index]
        yield BatchEntry(
            request.number,
            index >= batch.num_decode_requests,
            batch.num_tokens(index),
            min(batch.step.starts[row] + batch.step.counts[row], request.num_tokens),  # without rejected drafts
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
