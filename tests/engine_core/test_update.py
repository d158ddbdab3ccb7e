"""Updates of requests by a step's result, for spans that the executors of other tests do not return."""

from __future__ import annotations

import pytest
from paged_executor import Engine

from quire.engine_core.executor import PlainStepResult
from quire.engine_core.scheduling.batch import Batch
from quire.kernels.step import StepInput


@pytest.mark.parametrize(("num_sampled", "num_computed"), [(0, 3), (1, 4), (2, 5), (3, 6)])
def test_rejected_drafts_are_not_computed(num_sampled: int, num_computed: int) -> None:
    """A step with two drafts: the last token of a span is never computed, accepted drafts are."""
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=20)
    engine.step()
    [request] = engine.core.scheduler.running
    assert (request.num_tokens, request.num_computed_tokens) == (4, 3)
    batch = Batch(requests=[request], rows=[0], step=StepInput([request.slot], [3], [3]))
    engine.core._update.apply(batch, PlainStepResult([[7] * num_sampled]), 0.0)
    assert (request.num_tokens, request.num_computed_tokens) == (4 + num_sampled, num_computed)
    engine.core.end_all()
