"""Results of a simulation as records of a run."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import msgspec
import numpy as np

from quire.frontend.replay.record import Outcome, Phase, PhaseKind, RequestRecord, Sample
from quire.protocol.messages import EngineCoreEvent, ErrorKind, EventType
from quire.protocol.simulation import SimulatedResult, SimulationSample

_OUTCOMES = {ErrorKind.OVERLOADED: Outcome.REFUSED, ErrorKind.SHUTTING_DOWN: Outcome.REFUSED}


def record_of(result: SimulatedResult) -> RequestRecord:
    """What a request has felt; it was sent when the workload, or its session, wanted it."""
    times = np.frombuffer(result.token_times)
    record = RequestRecord(
        index=result.index,
        arrival=result.sent,
        sent=result.sent,
        prompt_tokens=result.prompt_tokens,
        wanted_output_tokens=result.wanted_output_tokens,
        ended=result.ended,
        output_tokens=len(times),
        gaps=array("d", np.diff(times).tobytes()),
        cached_tokens=result.cached_tokens,
        num_preemptions=sum(event.type is EventType.PREEMPTED for event in result.events),
        engine=result.engine,
        error=result.error,
    )
    if len(times):
        record.first_token, record.last_token = float(times[0]), float(times[-1])
    record.outcome = Outcome.COMPLETED
    if result.error_kind is not None:
        record.outcome = _OUTCOMES.get(result.error_kind, Outcome.FAILED)
    record.phases = phases_of(result.events, times.tolist())
    return record


def phases_of(events: list[EngineCoreEvent], token_times: list[float]) -> list[Phase]:
    """What it went through; after a preemption, what is computed again is a prefill until the next token."""
    phases: list[Phase] = []
    kind: PhaseKind | None = None
    begin = 0.0

    def enter(following: PhaseKind | None, time: float) -> None:
        nonlocal kind, begin
        if kind is not None:
            phases.append(Phase(kind, begin, time))
        kind, begin = following, time

    for event in events:
        if kind == "prefill" and phases[-1].kind == "preempted":
            resumed = bisect_right(token_times, begin)
            if resumed < len(token_times) and token_times[resumed] <= event.timestamp:
                enter("decode", token_times[resumed])
        enter(_KINDS.get(event.type), event.timestamp)
    return phases


_KINDS: dict[EventType, PhaseKind] = {
    EventType.QUEUED: "queued",
    EventType.SCHEDULED: "prefill",
    EventType.FIRST_TOKEN: "decode",
    EventType.PREEMPTED: "preempted",
}


def sample_of(sample: SimulationSample) -> Sample:
    """All engines together."""
    return Sample(**msgspec.structs.asdict(sample))
