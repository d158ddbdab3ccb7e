"""LoRA adapters of classifiers, rerankers and embedding models: what PEFT computes, alone and beside the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from http_server import Server
from pooled_checkpoints import (
    CLASSIFIERS,
    ENCODERS,
    hidden_states,
    load_model,
    logits,
    make,
    make_reranker,
    next_logits,
    prompts,
)
from reference_libraries import import_reference

from quire.frontend import LoRARequest, PoolingParams, RequestError

if TYPE_CHECKING:
    from conftest import EngineFactory

import_reference("peft")
peft_adapters = import_reference("peft_adapters")

PROMPTS = prompts()[:5]
RAW = PoolingParams(task="classify", use_activation=False)
WHOLE: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "r": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama-labels": WHOLE,
    "qwen2-reward": {"target_modules": "all-linear", "use_dora": True, "r": 4},
    "bert-labels": {"target_modules": ["query", "value", "dense"], "r": 4},
    "roberta-labels": {"target_modules": ["query", "key"], "r": 4},
    "modernbert-mean": {"target_modules": ["Wqkv", "Wi", "head.dense"], "r": 4, "use_dora": True},
}
"""Changes by base; all have a head of their own, whose layers are `score` or `classifier`."""


def checkpoint_of(name: str) -> Any:
    return next(each for each in (*CLASSIFIERS, *ENCODERS) if each.name == name)


def write(name: str, folder: Path, **fields: Any) -> Any:
    """Write a random model and a random adapter of it; return both as one model."""
    checkpoint = checkpoint_of(name)
    base = load_model(checkpoint, make(checkpoint, folder / "base"))
    return adapted(base, folder / "adapter", **fields)


def adapted(base: Any, folder: Path, **fields: Any) -> Any:
    """Write a random adapter of a model; return both."""
    made = peft_adapters.randomized(base, **fields)
    peft_adapters.save(made, folder)
    return made


def request_of(folder: Path, name: str = "adapter") -> LoRARequest:
    return LoRARequest(name, 1, str(folder / name))


def classify(llm: Any, given: list[list[int]], adapters: Any) -> list[list[float]]:
    outputs = llm.classify(given, pooling_params=RAW, use_tqdm=False, lora_request=adapters)
    return [output.outputs.probs for output in outputs]


@pytest.mark.parametrize("name", KINDS)
def test_classes_are_those_of_peft(name: str, tmp_path: Path, engine: EngineFactory) -> None:
    model = write(name, tmp_path, task_type="SEQ_CLS", **KINDS[name])
    llm, adapter = engine(tmp_path / "base", dtype="float32", enable_lora=True, max_loras=2), request_of(tmp_path)
    alone = [classify(llm, [prompt], adapter)[0] for prompt in PROMPTS]
    base = [classify(llm, [prompt], None)[0] for prompt in PROMPTS]
    expected = np.array([logits(model, prompt) for prompt in PROMPTS])
    np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    assert np.argsort(alone, axis=None).tolist() == np.argsort(expected, axis=None).tolist()
    assert np.abs(np.array(base) - expected).max() > 0.1
    mixed = classify(llm, [prompt for prompt in PROMPTS for _ in range(2)], [adapter, None] * len(PROMPTS))
    assert (mixed[::2], mixed[1::2]) == (alone, base)


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["plain", "magnitudes"])
def test_a_head_may_be_changed_by_low_rank(changes: Any, tmp_path: Path, engine: EngineFactory) -> None:
    model = write("llama-labels", tmp_path, target_modules=["score", "v_proj"], r=2, lora_alpha=5, **changes)
    llm = engine(tmp_path / "base", dtype="float32", enable_lora=True)
    expected = np.array([logits(model, prompt) for prompt in PROMPTS])
    found = classify(llm, PROMPTS, request_of(tmp_path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_a_head_that_does_not_fit_is_an_error_that_names_it(tmp_path: Path, engine: EngineFactory) -> None:
    """Of other labels, with what the head can't have, and of a base that has none."""
    write("llama-labels", tmp_path, task_type="SEQ_CLS", **WHOLE)
    (tmp_path / "other").mkdir()
    write("qwen2-reward", tmp_path / "other", task_type="SEQ_CLS", **WHOLE)
    biased = load_model(checkpoint_of("llama-labels"), tmp_path / "base")
    adapted(biased, tmp_path / "biased", target_modules=["score"], r=2, lora_bias=True)
    llm = engine(tmp_path / "base", dtype="float32", enable_lora=True)
    with pytest.raises(RequestError, match=r"score\.weight has shape \[1, 64\], .* asks for \[3, 64\]"):
        classify(llm, PROMPTS, request_of(tmp_path / "other"))
    with pytest.raises(RequestError, match=r"lora_bias changes score\.weight"):
        classify(llm, PROMPTS, request_of(tmp_path, "biased"))
    make_reranker(tmp_path / "decoder")
    decoder = engine(tmp_path / "decoder", dtype="float32", enable_lora=True)
    with pytest.raises(RequestError, match=r"modules_to_save has .*score\.weight', the head of a classification"):
        decoder.embed(PROMPTS, use_tqdm=False, lora_request=request_of(tmp_path))


RERANKERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ["q_proj", "up_proj"]},
    "head": {"target_modules": ["lm_head"], "use_dora": True},
    "whole-head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [5, 260, 261]}},
}


def test_rerankers_by_tokens_have_the_heads_of_their_adapters(tmp_path: Path, engine: EngineFactory) -> None:
    """The scores are those of the tokens' logits, whatever changes them, also of a tied head."""
    base, folder = make_reranker(tmp_path / "base"), tmp_path / "base"
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    tokens = {each["content"]: each["id"] for each in vocabulary}
    config = json.loads((folder / "config.json").read_text())
    labels = ["no", "yes", "<think>"]
    more = {"classifier_from_token": labels, "method": "no_post_processing"}
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    llm = engine(folder, dtype="float32", enable_lora=True, max_loras=4)
    plain = classify(llm, PROMPTS, None)
    for kind, fields in RERANKERS.items():
        if kind == "tokens":
            fields = {**fields, "trainable_token_indices": {"embed_tokens": [5, tokens["no"], tokens["yes"]]}}
        model = adapted(type(base).from_pretrained(folder).eval(), tmp_path / kind, r=4, **fields)
        found = classify(llm, PROMPTS, request_of(tmp_path, kind))
        expected = np.array([next_logits(model, prompt)[[tokens[label] for label in labels]] for prompt in PROMPTS])
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-4 * np.abs(expected).max(), err_msg=kind)
        assert np.abs(np.array(found) - plain).max() > 0.1
    assert classify(llm, PROMPTS, None) == plain


def test_embeddings_are_those_of_peft(tmp_path: Path, engine: EngineFactory) -> None:
    model = write("bert", tmp_path, target_modules=["query", "key", "output.dense"], r=4, lora_alpha=16)
    llm, adapter = engine(tmp_path / "base", dtype="float32", enable_lora=True, max_loras=2), request_of(tmp_path)
    params = PoolingParams(pooling_type="mean", normalize=False)

    def embed(given: list[list[int]], adapters: Any) -> list[list[float]]:
        outputs = llm.embed(given, params, use_tqdm=False, lora_request=adapters)
        return [output.outputs.embedding for output in outputs]

    alone, base = ([embed([prompt], each)[0] for prompt in PROMPTS] for each in (adapter, None))
    expected = np.array([hidden_states(model, prompt).mean(0) for prompt in PROMPTS])
    np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    mixed = embed([prompt for prompt in PROMPTS for _ in range(2)], [adapter, None] * len(PROMPTS))
    assert (mixed[::2], mixed[1::2]) == (alone, base)
    assert alone != base


def test_a_server_classifies_scores_and_ranks_by_the_adapter_that_is_named(tmp_path: Path) -> None:
    write("bert-pair", tmp_path, task_type="SEQ_CLS", target_modules=["query", "dense"], r=4)
    options = ("--model", str(tmp_path / "base"), "--dtype", "float32", "--lora-modules", f"judge={tmp_path}/adapter")
    texts = ["the fox", "a king and his daughter"]
    bodies: dict[str, dict[str, Any]] = {
        "/classify": {"input": texts},
        "/score": {"text_1": "a tale", "text_2": texts},
        "/v1/rerank": {"query": "a tale", "documents": texts},
    }

    def scores(answer: Any) -> list[float]:
        if "results" in answer:
            return [each["relevance_score"] for each in sorted(answer["results"], key=lambda each: each["index"])]
        return [each["score"] if "score" in each else each["probs"][0] for each in answer["data"]]

    with Server.start(*options) as server:

        def asked(path: str, model: str) -> list[float]:
            return scores(server.request(path, {"model": model, **bodies[path]}).json())

        found = {path: {model: asked(path, model) for model in (server.model, "judge")} for path in bodies}
    for of_path in found.values():
        assert of_path["judge"] != of_path[next(iter(of_path))]
    assert found["/score"]["judge"] == found["/v1/rerank"]["judge"]
