"""Short answers of a model that the test's own process loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, SamplingConfig, load_model
from quire.kernels.step import StepInput


def load(model: Path, **chosen: Any) -> ModelRunner:
    return load_model(LoadOptions(str(model), num_pages=8, threads=2, **chosen))


def answer(runner: ModelRunner) -> tuple[list[int], list[float]]:
    """Return four greedy tokens and their log probabilities."""
    slot = runner.sequences.open([5, 6, 7], 3, sampling=SamplingConfig(temperature=0.0, logprobs=3))
    assert runner.sequences.reserve(slot, 8)
    tokens: list[int] = []
    values: list[float] = []
    start, count = 0, 3
    for _ in range(4):
        result = runner.run(StepInput([slot], [start], [count]))
        entries = result.logprobs(0)
        assert entries is not None
        tokens += result.token_ids[0]
        values += entries[0][1]
        start, count = start + count, 1
    runner.sequences.close(slot)
    return tokens, values
