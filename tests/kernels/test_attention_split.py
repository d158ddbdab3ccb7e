"""Attention that is split over the blocks of a long context gives the bits of unsplit attention."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.kernels import _native, options, runner
from quire.kernels.emit import attention
from quire.kernels.emit.context import EmitContext

MANY_THREADS = 16  # more than the heads of one sequence occupy, so its attention is split


def answer(model: Path, length: int, threads: int, **chosen: Any) -> tuple[list[int], list[float]]:
    """Return three greedy tokens after a random prompt, with log probabilities."""
    engine = runner.load_model(options.LoadOptions(str(model), num_pages=64, threads=threads, **chosen))
    prompt = [int(token) for token in np.random.default_rng(length).integers(0, engine.vocab_size, length)]
    slot = engine.sequences.open(prompt, length, sampling=_native.SamplingConfig(temperature=0.0, logprobs=3))
    assert engine.sequences.reserve(slot, length + 3)
    tokens: list[int] = []
    values: list[float] = []
    engine.step([slot], [0], [length - 1])
    for position in range(length - 1, length + 2):
        result = engine.step([slot], [position], [1])
        entries = result.logprobs(0)
        assert entries is not None
        tokens += result.token_ids[0]
        values += entries[0][1]
    engine.sequences.close(slot)
    return tokens, values


@pytest.mark.parametrize("length", [255, 256, 257, 600, 1500])
def test_split_and_unsplit_attention_agree(demo_model: Path, length: int) -> None:
    assert answer(demo_model, length, MANY_THREADS) == answer(demo_model, length, 1)


@pytest.mark.parametrize("name", ["mistral-window77", "qwen2-tied-window", "llama-gqa8-dynamic"])
def test_windows_and_one_kv_head(checkpoints: Path, name: str) -> None:
    model = checkpoints / name
    assert answer(model, 700, MANY_THREADS, kv_cache_dtype="int8") == answer(model, 700, 1, kv_cache_dtype="int8")


def test_many_threads_do_split(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reduction that skips the KV splits, no token can be sampled; a single thread does not split."""
    expected = answer(demo_model, 600, 1)
    emit = attention.SplitReductionKernel.emit

    def without_blocks(self: attention.SplitReductionKernel, context: EmitContext) -> str:
        text = emit(self, context)
        return re.sub(r"(scf\.for %\d+ = (%\d+) to )%\d+( step)", r"\1\2\3", text)

    monkeypatch.setattr(attention.SplitReductionKernel, "emit", without_blocks)
    with pytest.raises(AssertionError):
        answer(demo_model, 600, MANY_THREADS)
    assert answer(demo_model, 600, 1) == expected
