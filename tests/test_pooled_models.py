"""Encoders and classification models equal `transformers` in float32, and have the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pooled_checkpoints import CLASSIFIERS, ENCODERS, PooledCheckpoint, hidden_states, logits, make, prompts

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM

PROMPTS = prompts()
TYPES = ("cls", "last", "mean", "max")


def softmax(values: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits."""
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def pooled(states: np.ndarray, kind: str) -> np.ndarray:
    """Return the vector of hidden states [tokens, hidden_size]."""
    return np.asarray({"cls": states[0], "last": states[-1], "mean": states.mean(0), "max": states.max(0)}[kind])


def embed(llm: LLM, kind: str, given: list[list[int]] = PROMPTS) -> list[list[float]]:
    """Return the embeddings of prompts, not normalized."""
    from quire.frontend import PoolingParams

    params = PoolingParams(pooling_type=kind, normalize=False)  # type: ignore[arg-type]
    return [output.outputs.embedding for output in llm.embed(given, params, use_tqdm=False)]


@pytest.fixture
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """The folder of a checkpoint, and the model of transformers."""
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    return tmp_path, make(request.param, tmp_path)


def each(checkpoints: tuple[PooledCheckpoint, ...]) -> pytest.MarkDecorator:
    """Run a test for each checkpoint."""
    return pytest.mark.parametrize("reference", checkpoints, ids=lambda each: each.name, indirect=True)


@each(ENCODERS)
def test_an_encoder_equals_transformers(reference: tuple[Path, Any], engine: EngineFactory) -> None:
    folder, model = reference
    llm = engine(folder, dtype="float32", max_num_batched_tokens=64)
    states = [hidden_states(model, prompt) for prompt in PROMPTS]
    for kind in TYPES:
        expected = np.array([pooled(each, kind) for each in states])
        np.testing.assert_allclose(embed(llm, kind), expected, rtol=0, atol=2e-4 * np.abs(expected).max())


@each(ENCODERS[:1] + ENCODERS[4:5])
@pytest.mark.parametrize("formats", [{"dtype": "bfloat16"}, {"quantization": "int8", "kv_cache_dtype": "int8"}])
def test_the_same_bits_in_any_batch(
    reference: tuple[Path, Any], formats: dict[str, str], engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = reference
    llm = engine(folder, **formats)
    together = [embed(llm, kind) for kind in TYPES]
    assert len({tuple(vector) for vectors in together for vector in vectors}) > 3 * len(PROMPTS)
    for index in (0, 4, len(PROMPTS) - 1):
        assert embed(llm, "mean", [PROMPTS[index]]) == [together[2][index]]
    assert embed(llm, "max", PROMPTS[::-1]) == together[3][::-1]
    monkeypatch.setenv("QUIRE_ISA", "avx2")
    other = engine(folder, **formats, threads=1, max_num_seqs=3, block_size=64)
    assert [embed(other, kind) for kind in TYPES] == together


@each(CLASSIFIERS)
def test_a_classifier_equals_transformers(reference: tuple[Path, Any], engine: EngineFactory) -> None:
    from quire.frontend import PoolingParams

    folder, model = reference
    llm = engine(folder, dtype="float32")
    expected = np.array([logits(model, prompt) for prompt in PROMPTS])
    raw = PoolingParams(task="classify", use_activation=False)
    found = [output.outputs.probs for output in llm.classify(PROMPTS, pooling_params=raw, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    expected = np.array([softmax(row) if len(row) > 1 else 1 / (1 + np.exp(-row)) for row in expected])
    found = [output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
