"""The engine's statistics, which go out after each step."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.kernels.runner import Sequences
from quire.protocol.messages import SchedulerStats
from quire.protocol.totals import EngineTotals


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one step, and the seconds of its parts."""

    number: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    update_seconds: float = 0.0


def collect_stats(last: StepRecord, scheduler: Scheduler, sequences: Sequences) -> SchedulerStats:
    """Return queues and pages as they are now, with the tokens and times of the last step."""
    return SchedulerStats(
        step=last.number,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        prefill_tokens=last.prefill_tokens,
        decode_tokens=last.decode_tokens,
        preemptions=scheduler.counters.preemptions,
        cached_tokens=last.cached_tokens,
        evictions=sequences.tree.num_evicted,
        wasted_tokens=scheduler.counters.wasted_tokens,
        pages_free=sequences.free_pages,
        pages_cached=sequences.cached_pages,
        pages_held=sequences.held_pages,
        pages_total=scheduler.limits.num_pages,
        schedule_seconds=last.schedule_seconds,
        execute_seconds=last.execute_seconds,
        update_seconds=last.update_seconds,
    )


def num_deferred(waiting: Iterable[Request]) -> int:
    """Count the waiting requests that wait for something other than room."""
    return sum(request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR for request in waiting)


def add_step(totals: EngineTotals, last: StepRecord) -> None:
    """Add a step to the totals."""
    totals.prefill_tokens += last.prefill_tokens
    totals.decode_tokens += last.decode_tokens
    totals.schedule_seconds += last.schedule_seconds
    totals.execute_seconds += last.execute_seconds
    totals.update_seconds += last.update_seconds
    totals.step_tokens.observe(last.prefill_tokens + last.decode_tokens)
    totals.step_seconds.observe(last.schedule_seconds + last.execute_seconds + last.update_seconds)
