"""`/api/embed` and `/api/embeddings` through Ollama's client, against `/v1/embeddings`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from http_server import Server
from ollama import Client
from openai import OpenAI

MODEL = "quire-demo"
TEXTS = ["The king had a daughter.", "A fox"]


@pytest.fixture(scope="module")
def ollama(server: Server) -> Client:
    return Client(host=server.url)


def vectors(openai: OpenAI, texts: Any, **more: Any) -> list[Any]:
    """Return the vectors that OpenAI's API gives."""
    answer = openai.embeddings.create(model=MODEL, input=texts, encoding_format="float", extra_body=more)
    return [pytest.approx(entry.embedding, abs=1e-6) for entry in answer.data]


def test_vectors_are_those_of_openais_api(ollama: Client, openai: OpenAI) -> None:
    answer = ollama.embed(MODEL, TEXTS)
    assert [list(vector) for vector in answer.embeddings] == vectors(openai, TEXTS)
    assert answer.model == MODEL
    assert answer.prompt_eval_count == openai.embeddings.create(model=MODEL, input=TEXTS).usage.prompt_tokens
    assert (answer.total_duration or 0) >= (answer.load_duration or 0) > 0
    [vector] = ollama.embed(f"{MODEL}:latest", TEXTS[1]).embeddings
    assert list(vector) == vectors(openai, TEXTS[1])[0]
    assert list(ollama.embeddings(MODEL, TEXTS[1]).embedding) == vectors(openai, TEXTS[1])[0]


def test_dimensions_are_cut_and_normalised(ollama: Client) -> None:
    [vector] = ollama.embed(MODEL, "A fox", dimensions=8).embeddings
    assert len(vector) == 8
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)


def test_long_texts_are_shortened_unless_a_client_objects(ollama: Client, openai: OpenAI, server: Server) -> None:
    long = "and " * 5000
    answer = ollama.embed(MODEL, long)
    assert answer.prompt_eval_count is not None
    assert answer.prompt_eval_count in {2047, 2048}
    assert [list(vector) for vector in answer.embeddings] == vectors(openai, long, truncate_prompt_tokens=-1)
    assert ollama.embeddings(MODEL, long).embedding
    refused = server.request("/api/embed", {"input": long, "truncate": False})
    assert (refused.status, "2048" in refused.json()["error"]) == (400, True)


def test_without_a_text_only_the_model_is_checked(ollama: Client) -> None:
    empty: list[Any] = ["", []]
    for nothing in empty:
        assert ollama.embed(MODEL, nothing).embeddings == []
    assert ollama.embeddings(MODEL, "").embedding == []


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, 400, "input is missing"),
        ({"input": 5}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1] is empty"),
        ({"input": [[1, 2]]}, 400, "input[0]"),
        ({"input": ["a"] * 5000}, 400, "5000 prompts"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "nonsense": 1}, 400, "nonsense"),
        ({"input": "a", "options": {"mirostat": 1}}, 400, "options.mirostat=1"),
        ({"input": "a", "model": "nomic-embed-text"}, 404, 'model "nomic-embed-text" not found'),
    ],
)
def test_bad_requests_are_rejected(server: Server, fields: dict[str, Any], status: int, words: str) -> None:
    reply = server.request("/api/embed", fields)
    assert reply.status == status
    assert words in reply.json()["error"]


def test_options_of_text_do_not_matter(ollama: Client) -> None:
    options = {"temperature": 0.2, "num_ctx": 99999, "num_thread": 4, "unknown": 1}
    assert (
        ollama.embed(MODEL, TEXTS, options=options, keep_alive="5m").embeddings == ollama.embed(MODEL, TEXTS).embeddings
    )
