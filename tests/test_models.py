"""Every architecture matches `transformers` token by token in float32, and is at least as accurate in bfloat16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoint_files import load_references
from checkpoints import CHECKPOINTS, NEW_TOKENS, ReferenceCheckpoint, References
from quantized_checkpoints import load, raw_floats, save

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM, RequestOutput

CHUNK = 200  # tokens of a step: the prompts of 300 and 700 tokens take several, beside others that decode
every_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)


def continuations(llm: LLM, references: References, max_tokens: int = NEW_TOKENS) -> list[RequestOutput]:
    """Return the engine's greedy continuation of each prompt, with the prompt's log probabilities."""
    from quire.frontend import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=0)
    return llm.generate(references.prompts, params, use_tqdm=False)


def prompt_logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    """Return the log probabilities of all prompt tokens but the first, for all requests in order."""
    values = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        positions = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        values += [entry[token].logprob for token, entry in positions if entry is not None]
    return np.array(values)


def root_mean_square(values: np.ndarray) -> float:
    """Return the root of the mean of the squares."""
    return float(np.sqrt(np.mean(values**2)))


@every_checkpoint
def test_float32_tokens_equal_transformers(
    checkpoint: ReferenceCheckpoint, checkpoints: Path, engine: EngineFactory,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    references = load_references(checkpoint.name)
    llm = engine(checkpoints / checkpoint.name, dtype="float32", max_num_seqs=8, max_num_batched_tokens=CHUNK)
    outputs = continuations(llm, references)
    # Check the prompts first: a wrong kernel shows at every position, and the first bad one helps to find it.
    ours = prompt_logprobs(outputs)
    record_property("largest_difference", f"{np.abs(ours - references.logprobs).max():.1e}")
    np.testing.assert_allclose(ours, references.logprobs, rtol=0, atol=1e-3)
    for greedy, output in zip(references.greedy, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy, f"prompt of {len(output.prompt_token_ids)} tokens"
        assert output.outputs[0].finish_reason == "length"


@every_checkpoint
def test_bfloat16_is_at_least_as_accurate_as_transformers(
    checkpoint: ReferenceCheckpoint, checkpoints: Path, engine: EngineFactory
) -> None:
    references = load_references(checkpoint.name)
    llm = engine(checkpoints / checkpoint.name, dtype="bfloat16", max_num_seqs=8)
    outputs = continuations(llm, references, max_tokens=1)
    ours, theirs = (found - references.logprobs for found in (prompt_logprobs(outputs), references.logprobs_bfloat16))
    # Both round weights and the inputs of products to bfloat16; transformers also rounds every sum. Its error is thus
    # an upper bound of the cost of bfloat16, and a real fault is many times larger.
    if checkpoint.has_experts:
        # A token that rounding sends to another expert errs by any amount, and such tokens dominate the largest errors.
        quantiles = [np.quantile(np.abs(errors), [0.25, 0.5, 0.75, 0.9]) for errors in (ours, theirs)]
        assert (quantiles[0] <= quantiles[1]).all()
        return
    assert root_mean_square(ours) <= root_mean_square(theirs)
    assert np.abs(ours).max() <= np.abs(theirs).max()


@pytest.mark.parametrize(
    ("name", "family", "prefix"),
    [
        ("gemma3-window100", "Gemma3", "language_model.model."),
        ("gemma4-experts", "Gemma4", "model.language_model."),
        ("gemma3n-window100", "Gemma3n", "model.language_model."),
    ],
)
def test_the_text_part_of_a_multimodal_checkpoint_gives_the_same_tokens(
    name: str, family: str, prefix: str, checkpoints: Path, engine: EngineFactory, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source, target = checkpoints / name, tmp_path / "multimodal"
    target.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, target)
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in load(source).items()}
    vision = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    tensors[vision] = raw_floats(np.zeros((4, 3, 2, 2), np.float32), "F32")
    text = json.loads((source / "config.json").read_text())
    architecture, model_type = f"{family}ForConditionalGeneration", family.lower()
    config = {"architectures": [architecture], "model_type": model_type, "text_config": text, "vision_config": {}}
    save(target, tensors, config)
    references = load_references(source.name)
    outputs = continuations(engine(target, dtype="float32"), references)
    assert f"only the text part of {architecture} is loaded" in capfd.readouterr().err
    assert [output.outputs[0].token_ids for output in outputs] == references.greedy


@pytest.mark.parametrize(("name", "family"), [("gemma3-window100", "Gemma3"), ("gemma3n-window100", "Gemma3n")])
def test_a_multimodal_model_without_logits_embeds_as_its_text_part(
    name: str, family: str, checkpoints: Path, engine: EngineFactory, tmp_path: Path
) -> None:
    text, found = json.loads((checkpoints / name / "config.json").read_text()), []
    configs = {
        "": {**text, "architectures": [f"{family}TextModel"]},
        "language_model.": {"architectures": [f"{family}Model"], "model_type": family.lower(), "text_config": text},
    }
    for prefix, config in configs.items():
        target = tmp_path / f"{prefix}model"
        target.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(checkpoints / name / file, target)
        tensors = load(checkpoints / name).items()
        save(target, {prefix + key.removeprefix("model."): tensor for key, tensor in tensors}, config)
        found.append(engine(target, dtype="float32").embed([[5, 6, 7, 8]])[0].outputs.embedding)
    assert found[0] == found[1]


def test_the_checkpoints_cover_what_the_models_differ_in() -> None:
    configs = [checkpoint.config for checkpoint in CHECKPOINTS]
    groups = {c["num_attention_heads"] // c["num_key_value_heads"] for c in configs if "num_key_value_heads" in c}
    assert groups == {1, 2, 4, 5, 8}
    head_dims = {c.get("head_dim") or c["n_embd"] // c["n_head"] for c in configs}
    assert head_dims == {32, 64, 80, 96, 128, 256}
    assert all(c["vocab_size"] % 16 for c in configs)
    ropes = {c.get("rope_parameters", {}).get("rope_type", "default") for c in configs}
    assert ropes == {"default", "llama3", "linear", "dynamic", "yarn", "longrope"}
    for architecture in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        assert sum(checkpoint.model_type == architecture for checkpoint in CHECKPOINTS) >= 2
