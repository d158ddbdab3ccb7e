"""Every architecture gives the tokens of `transformers` in float32, and in bfloat16 errs no more than it does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import CHECKPOINTS, NEW_TOKENS, Checkpoint, Reference, load_references

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM, RequestOutput

every_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)


def answers(llm: LLM, references: list[Reference]) -> list[RequestOutput]:
    """The engine's greedy continuation of each prompt, with the prompt's log probabilities."""
    from quire.frontend import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
    return llm.generate([entry.prompt for entry in references], params, use_tqdm=False)


def prompt_logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    """Log probabilities of the prompt tokens from the second on, of all requests in a row."""
    values = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        positions = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        values += [entry[token].logprob for token, entry in positions if entry is not None]
    return np.array(values)


@functools.cache
def expected(folder: Path) -> tuple[list[Reference], np.ndarray, np.ndarray]:
    """The references of a checkpoint, and their prompts' log probabilities in float32 and bfloat16 in a row."""
    references = load_references(folder)
    exact = np.array([value for entry in references for value in entry.logprobs])
    return references, exact, np.array([value for entry in references for value in entry.logprobs_bfloat16])


def root_mean_square(values: np.ndarray) -> float:
    """Root of the mean of the squares."""
    return float(np.sqrt(np.mean(values**2)))


@every_checkpoint
def test_float32_tokens_equal_transformers(checkpoint: Checkpoint, checkpoints: Path, engine: EngineFactory) -> None:
    references, exact, _ = expected(checkpoints / checkpoint.name)
    outputs = answers(engine(checkpoints / checkpoint.name, dtype="float32", max_num_seqs=8), references)
    # First the prompts: a wrong kernel shows in every position, and where it starts tells which one.
    np.testing.assert_allclose(prompt_logprobs(outputs), exact, rtol=0, atol=1e-3)
    for reference, output in zip(references, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.greedy, f"prompt of {len(reference.prompt)} tokens"
        assert output.outputs[0].finish_reason == "length"


@every_checkpoint
def test_bfloat16_errs_no_more_than_transformers(
    checkpoint: Checkpoint, checkpoints: Path, engine: EngineFactory
) -> None:
    references, exact, rounded = expected(checkpoints / checkpoint.name)
    outputs = answers(engine(checkpoints / checkpoint.name, dtype="bfloat16", max_num_seqs=8), references)
    ours, theirs = prompt_logprobs(outputs) - exact, rounded - exact
    # Both round weights to bfloat16, and what enters a product; transformers rounds every sum besides. So its error is
    # what bfloat16 rounding costs at most, and any real fault is many times larger.
    assert root_mean_square(ours) <= root_mean_square(theirs)
    assert np.abs(ours).max() <= np.abs(theirs).max()


def test_the_checkpoints_cover_what_the_models_differ_in() -> None:
    configs = [checkpoint.config for checkpoint in CHECKPOINTS]
    groups = {c["num_attention_heads"] // c["num_key_value_heads"] for c in configs if "num_key_value_heads" in c}
    assert groups == {1, 4, 8}
    head_dims = {c.get("head_dim") or c["n_embd"] // c["n_head"] for c in configs}
    assert head_dims == {64, 80, 96, 128}
    assert all(c["vocab_size"] % 16 for c in configs)
    ropes = {c.get("rope_parameters", {}).get("rope_type", "default") for c in configs}
    assert ropes == {"default", "llama3", "linear", "dynamic", "yarn"}
    for architecture in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        assert sum(checkpoint.model_type == architecture for checkpoint in CHECKPOINTS) >= 2
