"""Records of a run from the results of a simulation."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import msgspec
import numpy as np

from quire.frontend.evaluation.replay.record import TOGETHER, Outcome, Phases, RequestRecord, TargetSample
from quire.protocol.messages import EngineCoreEvent
from quire.protocol.simulation import SimulatedResult, SimulationSample


def record_of(result: SimulatedResult) -> RequestRecord:
    """Return the record of a request, which was sent when the workload, or its session, wanted it."""
    times = np.frombuffer(result.token_times)
    gaps = np.diff(times)
    record = RequestRecord(
        index=result.index,
        arrival=result.sent,
        sent=result.sent,
        prompt_tokens=result.prompt_tokens,
        wanted_output_tokens=result.wanted_output_tokens,
        ended=result.ended,
        output_tokens=len(times),
        gaps=array("d", gaps[gaps >= TOGETHER].tobytes()),
        cached_tokens=result.cached_tokens,
        engine=result.engine,
        error=result.error,
    )
    if len(times):
        record.first_token, record.last_token = float(times[0]), float(times[-1])
    record.outcome = Outcome.COMPLETED if result.error_kind is None else Outcome.of_error(result.error_kind)
    _fill_phases(record, result.events, times.tolist())
    return record


def _fill_phases(record: RequestRecord, events: list[EngineCoreEvent], token_times: list[float]) -> None:
    """Add the phases. The token that ends a prefill after a preemption has no event: it is the next token."""
    phases = Phases(record)
    for event in events:
        if phases.is_catching_up:
            following = bisect_right(token_times, phases.begin)
            if following < len(token_times) and token_times[following] <= event.timestamp:
                phases.take_token(token_times[following])
        phases.take(event.type, event.timestamp)


def sample_of(sample: SimulationSample) -> TargetSample:
    """Return the sample of all engines together."""
    return TargetSample(**msgspec.structs.asdict(sample))
