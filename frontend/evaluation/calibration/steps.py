"""What an engine's steps computed, and how long each took."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from quire.protocol.messages import SequenceTrace, StepTrace
from quire.protocol.simulation import StepWork

Array = npt.NDArray[np.float64]


class StepTimes:
    """Traces of steps as numbers: `work` is [steps][terms of a `StepTime`], `seconds` [steps]."""

    def __init__(self, plays: list[list[StepTrace]]) -> None:
        """Of each play the traces, in order."""
        steps = [pair for play in plays for pair in pairwise(trace for trace in play if trace.stats is not None)]
        self.work: Array = np.array([_terms(_work(step.sequences)) for step, _ in steps])
        self.seconds: Array = np.array([_seconds(step, after) for step, after in steps])


def _work(sequences: list[SequenceTrace]) -> StepWork:
    return StepWork.of([each.start for each in sequences], [each.count for each in sequences])


def _terms(work: StepWork) -> tuple[float, ...]:
    return (1.0, *work, work.prefill_tokens**2)


def _seconds(step: StepTrace, after: StepTrace) -> float:
    """From the begin of a step to that of the next; or to its own end, if the engine then had nothing to do."""
    numbers = {sequence.number for sequence in step.sequences}
    if any(sequence.number in numbers for sequence in after.sequences):
        return after.begin - step.begin
    assert step.stats is not None
    return step.stats.schedule_seconds + step.stats.execute_seconds + step.stats.update_seconds
