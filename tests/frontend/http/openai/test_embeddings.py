"""`/v1/embeddings` through OpenAI's client."""

from __future__ import annotations

import math
from typing import Any

import pytest
from http_server import Server
from openai import BadRequestError, OpenAI

from quire.frontend import LLM, PoolingParams

TEXTS = ["The king had a daughter.", "A fox", "The king had a daughter."]


def test_vectors_equal_those_of_the_python_api(openai: OpenAI, server: Server) -> None:
    answer = openai.embeddings.create(model="quire-demo", input=TEXTS)  # the client asks for base64
    with LLM(engine_address=server.engine_address) as llm:
        expected = [output.outputs.embedding for output in llm.embed(TEXTS)]
        mean = llm.embed(TEXTS[0], PoolingParams(pooling_type="mean", normalize=False))[0].outputs.embedding
        tokens: list[Any] = [llm.get_tokenizer().encode(text) for text in TEXTS]
    assert [entry.embedding for entry in answer.data] == [pytest.approx(vector, abs=1e-7) for vector in expected]
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert answer.data[0].embedding == answer.data[2].embedding
    assert math.hypot(*answer.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == sum(map(len, tokens))
    of_tokens = openai.embeddings.create(model="quire-demo", input=tokens, encoding_format="float")
    assert of_tokens.data[1].embedding == pytest.approx(expected[1], abs=1e-7)
    other = openai.embeddings.create(
        model="quire-demo", input=TEXTS[0], extra_body={"pooling_type": "mean", "normalize": False}
    )
    assert other.data[0].embedding == pytest.approx(mean, rel=1e-6)


def test_dimensions_are_cut_and_normalised(openai: OpenAI) -> None:
    answer = openai.embeddings.create(model="quire-demo", input="A fox", dimensions=8)
    assert len(answer.data[0].embedding) == 8
    assert math.hypot(*answer.data[0].embedding) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input": []}, "input is an empty list"),
        ({"input": ""}, "the prompt is empty"),
        ({"input": ["a", ""]}, r"input\[1\]: the prompt is empty; give some text"),
        ({"input": [[1], [99999]]}, r"input\[1\]: token id 99999"),
        ({"input": ["a", "a " * 5000]}, r"input\[1\]: the prompt has 5002 tokens"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100000}, "dimensions"),
        ({"input": "a " * 5000}, "2048"),
        ({"input": "a", "extra_body": {"pooling_type": "first"}}, "pooling_type"),
    ],
)
def test_bad_inputs_are_rejected(openai: OpenAI, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        openai.embeddings.create(model="quire-demo", **arguments)


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/pooling", {"input": ["a", "", "b"]}, "input[1]"),
        ("/pooling", {"input": [[5], [5], []]}, "input[2]"),
        ("/embeddings", {"content": ["a", ""]}, "content[1]"),
        ("/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]"),
    ],
)
def test_an_empty_text_among_others_is_named(server: Server, path: str, body: dict[str, Any], where: str) -> None:
    reply = server.request(path, body)
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (400, where)
    assert error["message"].startswith(f"{where}: the prompt is empty; give ")
