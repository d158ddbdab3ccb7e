"""Greedy steps of a runner, whose tokens and log probabilities tests compare bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from quire.kernels import options, runner
from quire.kernels.step import StepInput

Outputs = list[tuple[list[int], list[float]]]

_STEPS = 6


def generate(chosen: options.LoadOptions, lengths: Iterable[int], adapter: Path | None = None) -> Outputs:
    """Return tokens and log probabilities of 6 steps after each prompt, which is computed in chunks of
    `max_num_batched_tokens`, by an adapter if one is given."""
    engine = runner.load_model(chosen)
    if adapter is not None:
        engine.set_adapter(1, engine.read_adapter(adapter)[1])
    outputs: Outputs = []
    for length in lengths:
        prompt = np.random.default_rng(length).integers(0, engine.vocab_size, length).tolist()
        slot = engine.sequences.open(prompt, length, sampling=runner.SamplingConfig(temperature=0.0, logprobs=2))
        engine.sequences.set_adapter(slot, 0 if adapter is None else 1)
        assert engine.sequences.reserve(slot, length + _STEPS)
        tokens: list[int] = []
        values: list[float] = []
        done = 0
        while len(tokens) < _STEPS:
            count = min(chosen.max_num_batched_tokens, length + len(tokens) - done)
            result = engine.run(StepInput([slot], [done], [count]))
            done += count
            if result.token_ids[0]:
                tokens += result.token_ids[0]
                entries = result.logprobs(0)
                assert entries is not None
                values += entries[0][1]
        outputs.append((tokens, values))
        engine.sequences.close(slot)
    assert engine.sequences.free_pages == engine.num_pages
    return outputs
