"""`/classify`, `/pooling`, `/score` and `/rerank` of classification models, and what other models answer there."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server import Server
from pooled_checkpoints import CLASSIFIERS, make

from quire.frontend import LLM, PoolingParams

TEXTS = ["Once upon a time", "the fox said: I'll eat you!", "fox"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a cross-encoder with one label."""
    yield from serve(tmp_path_factory.mktemp("reranker"), "bert-pair")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model with five labels."""
    yield from serve(tmp_path_factory.mktemp("classifier"), "bert-labels")


def serve(folder: Path, name: str) -> Iterator[Server]:
    make(next(checkpoint for checkpoint in CLASSIFIERS if checkpoint.name == name), folder)
    with Server.start(str(folder), "--num-pages", "256") as server:
        yield server


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_are_those_of_python(classifier: Server, path: str) -> None:
    with LLM(engine_address=classifier.engine_address) as llm:
        expected = [output.outputs.probs for output in llm.classify(TEXTS)]
        raw = llm.classify(TEXTS, pooling_params=PoolingParams(task="classify", use_activation=False))
        tokens = sum(len(output.prompt_token_ids) for output in raw)
        assert [output.outputs.data for output in llm.encode(TEXTS)] == expected
    answer = classifier.request(path, {"input": TEXTS}).json()
    assert (answer["object"], answer["id"][:9]) == ("list", "classify-")
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for index, (entry, probs) in enumerate(zip(answer["data"], expected, strict=True)):
        assert entry == {
            "index": index, "label": f"LABEL_{int(np.argmax(probs))}", "probs": probs, "num_classes": 5
        }  # fmt: skip
        assert sum(probs) == pytest.approx(1)
    answer = classifier.request(path, {"input": TEXTS[0], "use_activation": False}).json()
    assert answer["data"][0]["probs"] == raw[0].outputs.probs
    assert min(raw[0].outputs.probs) < 0


@pytest.mark.parametrize("path", ["/pooling", "/v1/pooling"])
def test_vectors_of_the_task_that_the_model_has(classifier: Server, server: Server, path: str) -> None:
    with LLM(engine_address=classifier.engine_address) as llm:
        scores = llm.classify(TEXTS[0])[0].outputs.probs
    with LLM(engine_address=server.engine_address) as llm:
        vector = llm.embed(TEXTS[0])[0].outputs.embedding
        mean = llm.embed(TEXTS[0], PoolingParams(pooling_type="mean", dimensions=8))[0].outputs.embedding
    for each, expected in ((classifier, scores), (server, vector)):
        answer = each.request(path, {"input": TEXTS[:1]}).json()
        assert answer["object"] == "list"
        assert answer["data"] == [{"index": 0, "object": "pooling", "data": expected}]
    body = {"input": TEXTS[0], "pooling_type": "mean", "dimensions": 8, "encoding_format": "base64"}
    data = server.request(path, body).json()["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(data), "<f4").tolist() == mean


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_what_the_model_makes_of_each_pair(reranker: Server, path: str) -> None:
    with LLM(engine_address=reranker.engine_address) as llm:
        outputs = llm.score("fox", TEXTS)
    scores = [output.outputs.score for output in outputs]
    body = {"query": "fox", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    answer = reranker.request(path, body).json()
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [result["index"] for result in answer["results"]] == order
    assert [result["relevance_score"] for result in answer["results"]] == [scores[index] for index in order]
    assert answer["usage"]["total_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    short = reranker.request(path, body | {"top_n": 2, "return_documents": False}).json()
    assert short["results"] == [{"index": index, "relevance_score": scores[index]} for index in order[:2]]


def test_pairs_are_scored_one_to_one_and_one_to_many(reranker: Server) -> None:
    many = reranker.request("/v1/score", {"text_1": "fox", "text_2": TEXTS}).json()
    each = [reranker.request("/score", {"text_1": "fox", "text_2": text}).json() for text in TEXTS]
    assert [entry["score"] for entry in many["data"]] == [answer["data"][0]["score"] for answer in each]
    pairs = reranker.request("/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]}).json()
    with LLM(engine_address=reranker.engine_address) as llm:
        expected = [output.outputs.score for output in llm.score(TEXTS, TEXTS[::-1])]
    assert [entry["score"] for entry in pairs["data"]] == expected
    raw = reranker.request("/score", {"text_1": TEXTS, "text_2": TEXTS[::-1], "use_activation": False}).json()
    logits = np.array([entry["score"] for entry in raw["data"]])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "path", "body", "words"),
    [
        ("reranker", "/v1/embeddings", {"input": "a"}, "this model gives no embeddings; it scores by one label"),
        ("reranker", "/v1/completions", {"prompt": "a"}, "this model generates no text; it scores by one label"),
        ("reranker", "/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction is not possible"),
        ("reranker", "/score", {"text_1": "a", "text_2": "b", "pooling_type": "mean"}, "pooling_type='mean' has no"),
        ("reranker", "/rerank", {"query": "a", "documents": ["b " * 3000]}, "maximum context length is 512"),
        (
            "reranker",
            "/rerank",
            {"query": "a " * 5000, "documents": ["b"] * 1000, "truncate_prompt_tokens": 9},
            "the texts of all pairs have 10001000 characters",
        ),
        (
            "classifier",
            "/score",
            {"text_1": "a", "text_2": "b"},
            "can't score pairs of texts; it classifies by 5 labels",
        ),
        ("classifier", "/pooling", {"input": "a", "task": "embed"}, "gives no embeddings; it classifies by 5 labels"),
        ("server", "/classify", {"input": "a"}, "no labels to classify by; it generates text and embeds"),
        ("server", "/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "belongs to a classification"),
        ("server", "/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction is not possible"),
        ("server", "/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name='x' is not one of"),
        ("server", "/pooling", {"input": "a", "use_activation": True}, "belongs to a classification"),
        ("classifier", "/classify", {"input": "a", "truncation_side": "right"}, "truncation_side"),
        ("classifier", "/classify", {"input": []}, "input is an empty list"),
        ("classifier", "/classify", {"input": ["a"] * 5000}, "5000 prompts"),
        ("classifier", "/classify", {"input": [[1000000]]}, "1000000"),
    ],
)
def test_what_a_model_cannot_do_is_said(
    request: pytest.FixtureRequest, name: str, path: str, body: dict[str, Any], words: str
) -> None:
    answer = request.getfixturevalue(name).request(path, body)
    assert answer.status == 400
    assert re.search(words, answer.json()["error"]["message"])
