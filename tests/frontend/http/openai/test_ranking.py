"""`/score` and `/rerank`: similarities of texts are cosines of their embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import Server

from quire.frontend import LLM, PoolingParams

TEXTS = ["The king had a daughter.", "A fox", "The fox sleeps in the forest."]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(server: Server, path: str) -> None:
    with LLM(engine_address=server.engine_address) as llm:
        a, b, c = (output.outputs.embedding for output in llm.embed(TEXTS))
        scored = llm.score(TEXTS[0], TEXTS)
        assert [output.outputs.score for output in llm.score(TEXTS[:2], TEXTS[1:])] == [
            pytest.approx(sum(x * y for x, y in zip(*pair, strict=True)), abs=1e-6) for pair in ((a, b), (b, c))
        ]
        tokens = [llm.get_tokenizer().encode(text) for text in TEXTS]
    assert [output.outputs.score for output in scored] == [
        pytest.approx(sum(x * y for x, y in zip(a, other, strict=True)), abs=1e-6) for other in (a, b, c)
    ]
    assert scored[0].outputs.score == pytest.approx(1, abs=1e-5)
    assert scored[1].prompt_token_ids == tokens[0] + tokens[1]
    answer = server.request(path, {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert answer["object"] == "list"
    assert answer["id"].startswith("score-")
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert [entry["score"] for entry in answer["data"]] == [output.outputs.score for output in scored]
    assert answer["usage"]["prompt_tokens"] == len(tokens[0]) + sum(map(len, tokens))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_their_similarity(server: Server, path: str) -> None:
    query = {"query": TEXTS[1], "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    answer = server.request(path, query).json()
    with LLM(engine_address=server.engine_address) as llm:
        scores = [output.outputs.score for output in llm.score(TEXTS[1], TEXTS)]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert order[0] == 1  # the same text
    assert [result["index"] for result in answer["results"]] == order
    assert [result["relevance_score"] for result in answer["results"]] == [scores[index] for index in order]
    assert [result["document"]["text"] for result in answer["results"]] == [TEXTS[index] for index in order]
    short = server.request(path, query | {"top_n": 1, "return_documents": False}).json()
    assert short["results"] == [{"index": 1, "relevance_score": scores[1]}]


def test_no_cosine_is_beyond_1(server: Server) -> None:
    texts = [f"{text} {number}" for text in TEXTS for number in range(20)]
    with LLM(engine_address=server.engine_address) as llm:
        assert max(abs(output.outputs.score) for output in llm.score(texts, texts)) <= 1
    scores = [entry["score"] for entry in server.request("/score", {"text_1": texts, "text_2": texts}).json()["data"]]
    assert scores == [pytest.approx(1, abs=1e-6)] * len(texts)
    assert max(scores) <= 1


def test_equal_scores_keep_the_order_of_the_request(server: Server) -> None:
    answer = server.request("/rerank", {"query": TEXTS[0], "documents": [TEXTS[1]] * 3, "pooling_type": "mean"}).json()
    assert [result["index"] for result in answer["results"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 texts can't be paired with 3"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "no text to score"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2 is empty"),
        ("/score", {"text_1": "a"}, "text_2 is missing; give text_2, or in its place documents or data_2"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": ["c"]}, "text_1 and queries are the same; give text_1"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 5000}, "5001 prompts"),
        ("/rerank", {"query": "a", "documents": []}, "documents is an empty list"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n is -1"),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "image": "c"}]}, "image"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 8}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "a " * 5000, "documents": ["b"]}, "2048"),
    ],
)
def test_bad_inputs_are_rejected(server: Server, path: str, body: dict[str, Any], words: str) -> None:
    answer = server.request(path, body)
    assert answer.status == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(("first", "second"), [("queries", "documents"), ("data_1", "data_2"), ("queries", "text_2")])
def test_the_sides_of_a_score_have_the_names_of_vllm(server: Server, first: str, second: str) -> None:
    expected = server.request("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    assert server.request("/score", {first: TEXTS[0], second: TEXTS}).json()["data"] == expected


def test_a_score_needs_vectors_of_length_one_and_lists_that_match(server: Server) -> None:
    with LLM(engine_address=server.engine_address) as llm:
        with pytest.raises(ValueError, match="normalize=False is not allowed"):
            llm.score("a", "b", pooling_params=PoolingParams(normalize=False))
        with pytest.raises(ValueError, match="3 texts can't be paired with 2"):
            llm.score(TEXTS, TEXTS[:2])
