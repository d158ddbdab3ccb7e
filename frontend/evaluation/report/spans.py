"""How long a request was in what, by the events that its engine told."""

from __future__ import annotations

from collections.abc import Sequence

from quire.frontend.evaluation.replay.record import Phase


def queue_seconds(phases: Sequence[Phase]) -> float | None:
    """First scheduled - queued; None where the target told no events."""
    if not phases or phases[0].kind != "queued":
        return None
    return phases[0].end - phases[0].begin


def prefill_seconds(phases: Sequence[Phase]) -> float | None:
    """First token - first scheduled, whatever came between; None where the target told no events."""
    if queue_seconds(phases) is None:
        return None
    first_tokens = [phase.begin for phase in phases if phase.kind == "decode"]
    ends = [phase.end for phase in phases if phase.kind == "prefill"]
    if not ends:
        return None
    return (first_tokens[0] if first_tokens else ends[-1]) - phases[0].end
