"""LiteLLM, through all four APIs that it knows of the server's."""

from __future__ import annotations

import json
import os
from typing import Any

import jsonschema
import pytest
from http_server import Server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch prices
litellm = pytest.importorskip("litellm")

TALE: Any = [{"role": "user", "content": "Tell me a tale"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"animal": {"type": "string", "enum": ["fox", "crow"]}},
    "required": ["animal"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}
PROVIDERS = ["openai", "hosted_vllm", "ollama_chat", "ollama", "anthropic"]


def place(server: Server, provider: str) -> dict[str, Any]:
    """Return the model and the address as LiteLLM wants them."""
    base = server.url if provider in {"ollama", "ollama_chat", "anthropic"} else f"{server.url}/v1"
    return {"model": f"{provider}/quire-demo", "api_base": base, "api_key": "none", "max_retries": 0}


def ask(server: Server, provider: str, **fields: Any) -> Any:
    given = {"messages": TALE, "temperature": 0, "max_tokens": 12, **fields}
    return litellm.completion(**place(server, provider), **given)


def expected(server: Server) -> str:
    body = {"messages": TALE, "temperature": 0, "max_tokens": 12}
    return str(server.request("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_chat_has_the_servers_answer(server: Server, provider: str) -> None:
    answer = ask(server, provider)
    text = answer.choices[0].message.content
    assert provider == "ollama" or text == expected(server)  # which writes the prompt itself
    assert answer.usage.completion_tokens == 12
    pieces = list(ask(server, provider, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text != ""


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_tool_is_called(server: Server, provider: str) -> None:
    answer = ask(server, provider, tools=[TOOL], tool_choice="required", max_tokens=60, parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama_chat", "ollama"])
def test_an_answer_follows_a_schema(server: Server, provider: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    answer = ask(server, provider, response_format=form, max_tokens=60)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama"])
def test_embeddings_are_the_servers(server: Server, provider: str) -> None:
    texts = ["Once upon a time", "The fox"]
    vectors = [each["embedding"] for each in server.request("/v1/embeddings", {"input": texts}).json()["data"]]
    where = place(server, provider)
    del where["max_retries"]
    answer = litellm.embedding(**where, input=texts)
    for found, vector in zip(answer.data, vectors, strict=True):
        assert found["embedding"] == pytest.approx(vector, abs=1e-6)


def test_text_and_ranking(server: Server) -> None:
    given: Any = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    text = server.request("/v1/completions", given).json()["choices"][0]["text"]
    where = place(server, "text-completion-openai")
    assert litellm.text_completion(**where, **given).choices[0].text == text
    documents = ["The king had a daughter.", "The fox sleeps."]
    ranked = litellm.rerank(
        model="hosted_vllm/quire-demo", api_base=server.url, query="A fox", documents=documents, top_n=1, api_key="x"
    )
    best = server.request("/rerank", {"query": "A fox", "documents": documents, "top_n": 1}).json()["results"][0]
    assert ranked.results[0]["index"] == best["index"]


def test_fields_of_openais_that_change_nothing_are_accepted(server: Server) -> None:
    answer = ask(
        server,
        "openai",
        drop_params=True,
        user="someone",
        metadata={"run": "1"},
        store=False,
        seed=3,
        n=1,
        service_tier="auto",
        reasoning_effort="low",
        verbosity="medium",
        logprobs=True,
        top_logprobs=2,
        safety_identifier="x",
        prompt_cache_key="y",
        parallel_tool_calls=None,
        extra_body={"top_k": 1},
    )
    assert answer.choices[0].message.content == expected(server)


def test_the_responses_api_answers_too(server: Server) -> None:
    answer = litellm.responses(**place(server, "openai"), input="Tell me a tale", temperature=0, max_output_tokens=16)
    assert answer.output[0].content[0].text.startswith(expected(server))


def test_errors_are_of_litellms_kinds(server: Server) -> None:
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(**{**place(server, "openai"), "model": "openai/none"}, messages=TALE)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(server, "openai", temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(server, "openai", messages=[{"role": "user", "content": "and " * 5000}])
