"""LlamaIndex's models and embeddings, through OpenAI's API and Ollama's."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from http_server import Server

pytest.importorskip("llama_index.llms.openai_like")
pytest.importorskip("llama_index.llms.ollama")
pytest.importorskip("llama_index.embeddings.openai_like")
pytest.importorskip("llama_index.embeddings.ollama")

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

TALE = "Tell me a tale"


class Animal(BaseModel):
    """An animal of the tale."""

    model_config = ConfigDict(extra="forbid")
    animal: Literal["fox", "crow"]


class City(BaseModel):
    """The argument of `get_weather`."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


def get_weather(city: str) -> str:
    """Look the weather up."""
    return f"sunny in {city}"


WEATHER = FunctionTool.from_defaults(get_weather, fn_schema=City)


def openai_like(server: Server, **options: Any) -> OpenAILike:
    given: Any = {"model": "quire-demo", "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    flags = {"is_chat_model": True, "context_window": 2048, "temperature": 0, "max_tokens": 12}
    return OpenAILike(**{**given, **flags, **options})


def ollama(server: Server, **options: Any) -> Ollama:
    given: Any = {"model": "quire-demo", "base_url": server.url, "context_window": 2048, "request_timeout": 60}
    return Ollama(**{**given, "additional_kwargs": {"num_predict": 12}, "temperature": 0, **options})


@pytest.fixture(params=["openai", "ollama"])
def llm(server: Server, request: pytest.FixtureRequest) -> Any:
    """Connect a model by either API."""
    return openai_like(server) if request.param == "openai" else ollama(server)


def expected(server: Server, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    return str(server.request("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def test_a_chat_has_the_servers_answer(server: Server, llm: Any) -> None:
    messages = [ChatMessage(role="system", content="You tell tales."), ChatMessage(role="user", content=TALE)]
    told = [{"role": "system", "content": "You tell tales."}, {"role": "user", "content": TALE}]
    answer = llm.chat(messages).message.content
    assert answer == expected(server, told)
    *_, last = llm.stream_chat(messages)
    assert last.message.content == answer


def test_a_completion_has_the_servers_answer(server: Server, llm: Any) -> None:
    answer = llm.complete(TALE).text
    assert answer == expected(server, [{"role": "user", "content": TALE}])
    assert "".join(piece.delta or "" for piece in llm.stream_complete(TALE)) == answer
    plain = openai_like(server, is_chat_model=False).complete("Once upon a time").text
    given: Any = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    assert plain == server.request("/v1/completions", given).json()["choices"][0]["text"]


def test_answers_follow_a_model_of_pydantic(server: Server) -> None:
    structured = openai_like(server, max_tokens=60, should_use_structured_outputs=True).as_structured_llm(Animal)
    assert structured.complete(TALE).raw.animal in {"fox", "crow"}
    by_tool = openai_like(server, max_tokens=60, is_function_calling_model=True).as_structured_llm(Animal)
    assert by_tool.complete(TALE).raw.animal in {"fox", "crow"}
    by_ollama = ollama(server, additional_kwargs={"num_predict": 60}).as_structured_llm(Animal)
    assert by_ollama.complete(TALE).raw.animal in {"fox", "crow"}


def test_a_tool_is_called(server: Server) -> None:
    model = openai_like(server, max_tokens=60, is_function_calling_model=True)
    answer = model.chat_with_tools([WEATHER], user_msg=TALE, tool_required=True)
    [call, *_] = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather"
    assert call.tool_kwargs["city"] in {"Rome", "Oslo"}
    assert model.predict_and_call([WEATHER], user_msg=TALE, tool_required=True).response.startswith("sunny in")


def test_tools_can_be_offered_by_ollamas_api(hermes: Server) -> None:
    model = ollama(hermes, model="model")
    answer = model.chat_with_tools([WEATHER], user_msg=TALE)
    assert model.get_tool_calls_from_response(answer, error_on_no_tool_call=False) is not None


def test_embeddings_are_the_servers(server: Server) -> None:
    texts = ["Once upon a time", "The fox"]
    vectors = [each["embedding"] for each in server.request("/v1/embeddings", {"input": texts}).json()["data"]]
    by_openai = OpenAILikeEmbedding(model_name="quire-demo", api_base=f"{server.url}/v1", api_key="none")
    by_ollama = OllamaEmbedding(model_name="quire-demo", base_url=server.url)
    for embedding in (by_openai, by_ollama):
        for found, vector in zip(embedding.get_text_embedding_batch(texts), vectors, strict=True):
            assert found == pytest.approx(vector, abs=1e-6)


def test_errors_are_raised(server: Server) -> None:
    with pytest.raises(Exception, match="does not exist"):
        openai_like(server, model="gpt-none").complete(TALE)
    with pytest.raises(Exception, match="not found"):
        ollama(server, model="llama-none").complete(TALE)
    with pytest.raises(Exception, match="temperature"):
        openai_like(server, temperature=-1).complete(TALE)
