"""Pages of KV memory are copied out and filled again, also by another runner, and go on with the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, SamplingConfig, Sequences, load_model
from quire.kernels.step import StepInput

PROMPT = [10 + 7 * i % 480 for i in range(200)]
SIZE = 32


@pytest.fixture(
    scope="module",
    params=[("", {}), ("", {"kv_cache_dtype": "int8", "block_size": 64}), ("gemma4-shared-window100", {})],
    ids=str,
)
def loaded(request: pytest.FixtureRequest, demo_model: Path, checkpoints: Path) -> LoadOptions:
    """The demo model, or a model whose layers have KV of different sizes."""
    name, chosen = request.param
    return LoadOptions(str(checkpoints / name if name else demo_model), num_pages=32, threads=1, **chosen)


def compute(engine: ModelRunner, start: int) -> tuple[int, object]:
    """The slot of a sequence whose first `start` tokens the cache has, and its first token's log probabilities."""
    sampling = SamplingConfig(seed=0, logprobs=3)
    slot = engine.sequences.open(PROMPT, len(PROMPT), sampling=sampling, cache_salt="")
    assert engine.sequences.start(slot, len(PROMPT)) == start
    return slot, engine.run(StepInput([slot], [start], [len(PROMPT) - start])).logprobs(0)


def test_another_runner_goes_on_with_copied_pages(loaded: LoadOptions) -> None:
    one, other = load_model(loaded), load_model(loaded)
    slot, expected = compute(one, 0)
    count = len(PROMPT) // one.block_size
    target = other.sequences.open(PROMPT, len(PROMPT), cache_salt="")
    assert other.sequences.start(target, count * one.block_size) == 0
    for i in range(count):
        copy = np.empty(one.page_bytes, np.uint8)
        checksum = one.copy_page(one.sequences.pages(slot)[i], copy)
        assert other.fill_page(other.sequences.pages(target)[i], copy) == checksum
        copy[7] ^= 1
        assert other.fill_page(31, copy) != checksum
    other.sequences.share(target, count * one.block_size)
    other.sequences.close(target)
    assert compute(other, count * one.block_size)[1] == expected


@pytest.mark.parametrize(("page", "missing"), [(-1, 0), (32, 0), (0, 1), (0, -1)])
def test_pages_and_sizes_that_cannot_be_are_rejected(demo_model: Path, page: int, missing: int) -> None:
    engine = load_model(LoadOptions(str(demo_model), num_pages=32, threads=1))
    copy = np.empty(engine.page_bytes - missing, np.uint8)
    for method in (engine.copy_page, engine.fill_page):
        with pytest.raises(ValueError, match="the page must be from 0 to 31"):
            method(page, copy)


def test_runners_with_the_same_kv_have_one_format(demo_model: Path) -> None:
    options = LoadOptions(str(demo_model), num_pages=32, threads=1)
    kv_format = load_model(options).kv_format()
    assert load_model(dataclasses.replace(options, num_pages=64, max_num_batched_tokens=64)).kv_format() == kv_format
    for other in ({"kv_cache_dtype": "int8"}, {"block_size": 64}, {"quantization": "int8"}, {"max_model_len": 1024}):
        assert load_model(dataclasses.replace(options, **other)).kv_format() != kv_format


def test_a_held_match_grows_with_the_cache_and_is_not_evicted() -> None:
    sequences = Sequences(6, SIZE, 3000)
    held = sequences.open(PROMPT, len(PROMPT), cache_salt="")
    assert sequences.hold_match(held) == 0
    writer = sequences.open(PROMPT, len(PROMPT), cache_salt="")
    assert sequences.start(writer, 5 * SIZE) == 0
    for count in (1, 3, 5):
        sequences.share(writer, count * SIZE)
        assert sequences.hold_match(held) == count * SIZE
        assert sequences.pages(held) == sequences.pages(writer)[:count]
    sequences.close(writer)
    assert (sequences.held_pages, sequences.cached_pages, sequences.free_pages) == (5, 0, 1)
    other = sequences.open([7] * 3 * SIZE, 3 * SIZE, cache_salt="")
    assert sequences.start(other, 3 * SIZE) is None
    sequences.close(held)
    assert sequences.start(other, 3 * SIZE) == 0
    with pytest.raises(RuntimeError, match="it cannot hold a prefix match"):
        sequences.hold_match(other)
    sequences.close(other)
    assert sequences.held_pages == 0
