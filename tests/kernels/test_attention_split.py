"""Attention that is split over the blocks of a long context gives the bits of unsplit attention."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.kernels import _native, options, runner
from quire.kernels.emit import attention
from quire.kernels.emit.context import EmitContext
from quire.kernels.step import StepInput

MANY_THREADS = 16  # more than the heads of one sequence occupy, so its attention is split


def answer(model: Path, length: int, threads: int, **chosen: Any) -> tuple[list[int], list[float]]:
    """Return three greedy tokens after a random prompt, with log probabilities."""
    engine = runner.load_model(options.LoadOptions(str(model), num_pages=64, threads=threads, **chosen))
    prompt = [int(token) for token in np.random.default_rng(length).integers(0, engine.vocab_size, length)]
    slot = engine.sequences.open(prompt, length, sampling=_native.SamplingConfig(temperature=0.0, logprobs=3))
    assert engine.sequences.reserve(slot, length + 3)
    tokens: list[int] = []
    values: list[float] = []
    engine.run(StepInput([slot], [0], [length - 1]))
    for position in range(length - 1, length + 2):
        result = engine.run(StepInput([slot], [position], [1]))
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


def with_window(demo_model: Path, folder: Path, layers: list[str]) -> Path:
    """Return a copy of the demo model whose sliding layers attend to 300 tokens."""
    model = folder / "model"
    shutil.copytree(demo_model, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 300, "layer_types": layers}
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(
    ("full_layers", "position", "blocks"),
    [(0, 299, 2), (0, 554, 3), (0, 555, 2), (0, 1499, 2), (0, 1534, 2), (0, 1578, 3), (1, 1499, 6)],
)
def test_blocks_before_the_window_get_no_kv_split(
    demo_model: Path, tmp_path: Path, full_layers: int, position: int, blocks: int
) -> None:
    """Only what a layer attends to is split: from block (position - 299) // 256 on, unless a layer attends to all."""
    types = ["full_attention"] * full_layers + ["sliding_attention"] * (6 - full_layers)
    chosen = options.LoadOptions(str(with_window(demo_model, tmp_path, types)), num_pages=64, threads=MANY_THREADS)
    plan, _ = runner.describe(chosen)
    native = runner.assemble(plan, chosen).native
    entry = np.array([0, 1, position, 0], np.int64)
    ctypes.memmove(native.inputs["entries"], entry.ctypes.data, entry.nbytes)
    found = native.split_attention({"entries": 1})
    assert {name: found[name] for name in ("entries", "kv_splits", "reductions")} == {
        "entries": 0,
        "kv_splits": blocks,
        "reductions": 1,
    }
    kv_splits = np.ctypeslib.as_array((ctypes.c_int64 * (4 * blocks)).from_address(native.inputs["kv_splits"]))
    last = position // 256
    assert kv_splits.reshape(blocks, 4)[:, 3].tolist() == list(range(last + 1 - blocks, last + 1))


@pytest.mark.parametrize("full_layers", [0, 2])
@pytest.mark.parametrize("length", [555, 600, 1500])
def test_a_split_window_gives_the_bits_of_an_unsplit_one(
    demo_model: Path, tmp_path: Path, full_layers: int, length: int
) -> None:
    types = ["full_attention"] * full_layers + ["sliding_attention"] * (6 - full_layers)
    model = with_window(demo_model, tmp_path, types)
    assert answer(model, length, MANY_THREADS) == answer(model, length, 1)


def test_layers_with_a_shorter_window_skip_the_splits_before_it(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reduction that begins at the first split finds no results of blocks before the window."""
    model = with_window(demo_model, tmp_path, ["full_attention"] * 2 + ["sliding_attention"] * 4)
    expected = answer(model, 1500, 1)
    emit = attention.SplitReductionKernel.emit
    monkeypatch.setattr(
        attention.SplitReductionKernel, "emit", lambda kernel, context: emit(replace(kernel, window=0), context)
    )
    with pytest.raises(AssertionError):
        assert answer(model, 1500, MANY_THREADS) == expected
