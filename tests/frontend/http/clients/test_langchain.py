"""LangChain's chat models, completions and embeddings, through OpenAI's API and Ollama's."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from http_server import Server

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain_ollama")

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

TALE = "Tell me a tale"
SCHEMA: Any = {
    "title": "Animal",
    "description": "An animal of the tale.",
    "type": "object",
    "properties": {"animal": {"type": "string", "enum": ["fox", "crow"]}},
    "required": ["animal"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "title": "get_weather",
    "description": "Look the weather up.",
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def chat_openai(server: Server, **options: Any) -> ChatOpenAI:
    given = {"model": "quire-demo", "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(**{**given, "stream_usage": True, "temperature": 0, "max_tokens": 12, **options})


def chat_ollama(server: Server, **options: Any) -> ChatOllama:
    given = {"model": "quire-demo", "base_url": server.url}
    return ChatOllama(**{**given, "temperature": 0, "num_predict": 12, **options})


@pytest.fixture(params=["openai", "ollama"])
def chat(server: Server, request: pytest.FixtureRequest) -> Any:
    """Connect a chat model by either API."""
    return chat_openai(server) if request.param == "openai" else chat_ollama(server)


def expected(server: Server, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    return str(server.request("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def test_a_chat_has_the_servers_answer_and_its_counts(server: Server, chat: Any) -> None:
    answer = chat.invoke([SystemMessage("You tell tales."), HumanMessage(TALE)])
    told = [{"role": "system", "content": "You tell tales."}, {"role": "user", "content": TALE}]
    assert answer.content == expected(server, told)
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.usage_metadata["input_tokens"] > 0


def test_streams_add_up_to_the_answer(chat: Any) -> None:
    pieces = list(chat.stream(TALE))
    assert len(pieces) > 1
    assert "".join(piece.content for piece in pieces) == chat.invoke(TALE).content
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata["output_tokens"] == 12


def test_batches_run_together(chat: Any) -> None:
    answers = chat.batch([TALE, "Tell me another", TALE])
    assert answers[0].content == answers[2].content == chat.invoke(TALE).content


def test_answers_follow_a_schema(server: Server) -> None:
    long = {"max_tokens": 60}
    for method in ("json_schema", "function_calling"):
        found = chat_openai(server, **long).with_structured_output(SCHEMA, method=method, strict=True).invoke(TALE)
        jsonschema.validate(found, SCHEMA)
    jsonschema.validate(chat_openai(server, **long).with_structured_output(SCHEMA).invoke(TALE), SCHEMA)
    found = chat_ollama(server, num_predict=60).with_structured_output(SCHEMA, method="json_schema").invoke(TALE)
    jsonschema.validate(found, SCHEMA)


def test_a_tool_is_called_and_its_result_is_read(server: Server) -> None:
    chat = chat_openai(server, max_tokens=60)
    called = chat.bind_tools([WEATHER], tool_choice="any", strict=True, parallel_tool_calls=False).invoke(TALE)
    [call] = called.tool_calls
    assert call["name"] == "get_weather"
    jsonschema.validate(call["args"], WEATHER)
    named = chat.bind_tools([WEATHER], tool_choice="get_weather").invoke(TALE)
    assert [each["name"] for each in named.tool_calls] == ["get_weather"]
    pieces = list(chat.bind_tools([WEATHER], tool_choice="any").stream(TALE))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["args"] == call["args"]


def test_results_of_tools_go_back(hermes: Server) -> None:
    messages = [
        HumanMessage("The weather?"),
        AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Rome"}, "id": "call-1"}]),
        ToolMessage("sunny", tool_call_id="call-1"),
    ]
    for chat in (chat_openai(hermes, model="model"), chat_ollama(hermes, model="model")):
        answer = chat.bind_tools([WEATHER]).invoke(messages)
        assert answer.usage_metadata["input_tokens"] > 20


def test_completions_continue_a_text(server: Server) -> None:
    given: Any = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    text = server.request("/v1/completions", given).json()["choices"][0]["text"]
    options: Any = {"model": "quire-demo", "temperature": 0, "max_tokens": 12, "api_key": "none"}
    completions = OpenAI(base_url=f"{server.url}/v1", **options)
    assert completions.invoke("Once upon a time") == text
    assert "".join(completions.stream("Once upon a time")) == text
    by_ollama = OllamaLLM(model="quire-demo", base_url=server.url, temperature=0, num_predict=12)
    assert by_ollama.invoke(TALE) == expected(server, [{"role": "user", "content": TALE}])
    assert "".join(by_ollama.stream(TALE)) == by_ollama.invoke(TALE)


def test_embeddings_are_the_servers(server: Server) -> None:
    texts = ["Once upon a time", "The fox"]
    vectors = [each["embedding"] for each in server.request("/v1/embeddings", {"input": texts}).json()["data"]]
    options: Any = {"base_url": f"{server.url}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    by_openai = OpenAIEmbeddings(model="quire-demo", **options)
    by_ollama = OllamaEmbeddings(model="quire-demo", base_url=server.url)
    for embeddings in (by_openai, by_ollama):
        for found, vector in zip(embeddings.embed_documents(texts), vectors, strict=True):
            assert found == pytest.approx(vector, abs=1e-6)
        assert embeddings.embed_query(texts[0]) == pytest.approx(vectors[0], abs=1e-6)


def test_fields_of_openais_that_change_nothing_are_accepted(server: Server) -> None:
    options: Any = {
        "n": 1,
        "seed": 3,
        "user": "someone",
        "metadata": {"run": "1"},
        "store": False,
        "service_tier": "auto",
        "verbosity": "medium",
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "model_kwargs": {"safety_identifier": "x", "prompt_cache_key": "y"},
        "extra_body": {"top_k": 1},
    }
    answer = chat_openai(server, **options).invoke(TALE)
    assert answer.content == chat_openai(server).invoke(TALE).content
    assert len(answer.response_metadata["logprobs"]["content"]) == 12


def test_the_responses_api_answers_too(server: Server) -> None:
    chat = chat_openai(server, use_responses_api=True, max_tokens=16)
    answer = chat.invoke(TALE)
    assert answer.text == chat_openai(server, max_tokens=16).invoke(TALE).content
    assert "".join(piece.text for piece in chat.stream(TALE)) == answer.text


def test_errors_are_raised(server: Server) -> None:
    with pytest.raises(Exception, match="does not exist"):
        chat_openai(server, model="gpt-none").invoke(TALE)
    with pytest.raises(Exception, match="not found"):
        chat_ollama(server, model="llama-none").invoke(TALE)
    with pytest.raises(Exception, match="temperature"):
        chat_openai(server, temperature=-1).invoke(TALE)
    with pytest.raises(Exception, match="maximum context length"):
        chat_openai(server).invoke("and " * 5000)
