"""The features that wait for a draft head."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.speculation.eagle import EagleDrafts
from quire.kernels.step import StepInput

WIDTH, STEP_TOKENS = 1024, 2048


@dataclass(eq=False)
class _Request:
    """What matters of a request."""

    slot: int
    num_prompt_tokens: int
    decoding: Any = field(default_factory=lambda: SimpleNamespace(takes_spans=True))
    is_finished: bool = False


def proposer() -> EagleDrafts:
    head: Any = SimpleNamespace(sequences=None, max_num_batched_tokens=STEP_TOKENS, num_features=3, lookahead=False)
    nothing: Any = None
    features = [np.full((STEP_TOKENS, WIDTH), number, np.float32) for number in range(3)]
    return EagleDrafts(head, nothing, features)


def observe(drafts: EagleDrafts, *chunks: tuple[Any, int, int]) -> None:
    """Let it see a step: of each request the tokens from one position on, so many."""
    rows = list(range(len(chunks)))
    requests, starts, counts = [chunk[0] for chunk in chunks], [chunk[1] for chunk in chunks], [c[2] for c in chunks]
    drafts.observe(Batch(requests=requests, rows=rows, step=StepInput(rows, starts, counts)))


def waiting(drafts: EagleDrafts) -> list[Any]:
    """Return all arrays of features that wait."""
    return [rows for kept in drafts._kept.values() for rows in kept.rows]


def test_features_that_wait_hold_no_memory_but_their_own() -> None:
    """Those of a step are many times as large."""
    drafts, decoding, prompt = proposer(), _Request(0, 10), _Request(1, 1 << 20)
    for step in range(100):
        observe(drafts, (decoding, 9 + step, 1), (prompt, 500 * step, 500))
    arrays = waiting(drafts)
    assert sum(len(rows) for rows in arrays) == 100
    assert all(rows.base is None for rows in arrays)
    assert (arrays[0][0, ::WIDTH] == [0, 1, 2]).all()
    first: Any = decoding
    assert drafts._take(first, 60).shape == (60, 3 * WIDTH)
    assert [rows.shape for rows in waiting(drafts)] == [(40, 3 * WIDTH)]
    assert all(rows.base is None for rows in waiting(drafts))
    drafts._take(first, 40)
    assert not waiting(drafts)


def test_prompts_leave_room_for_the_features_of_requests_that_decode() -> None:
    """64 MiB are 5461 rows here, and three parts in four are for prompts."""
    drafts, decoding = proposer(), _Request(0, 10)
    observe(drafts, (decoding, 9, 1))
    for number in range(20):
        observe(drafts, (_Request(1 + number, 512), 0, 512))
    assert sum(len(rows) for rows in waiting(drafts)) == 1 + 7 * 512
    observe(drafts, (decoding, 10, 1))
    assert sum(len(rows) for rows in waiting(drafts)) == 2 + 7 * 512
