"""Every field that known clients send is known: it works, changes nothing, or is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from http_server import Server
from openai.types import completion_create_params as text_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from quire.frontend.http.dialects.anthropic.body import CountBody, MessagesBody
from quire.frontend.http.openai.chat import ChatBody
from quire.frontend.http.openai.completions import CompletionBody
from quire.frontend.http.openai.embeddings import EmbeddingBody
from quire.frontend.http.openai.fields import REFUSED
from quire.frontend.http.openai.responses.body import ResponsesBody
from quire.frontend.http.transport.bodies import Body

CHAT: Any = {"messages": [{"role": "user", "content": "Tell me a tale"}], "temperature": 0, "max_tokens": 8}
TEXT: Any = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (chat_params.CompletionCreateParamsBase, ChatBody),
        (text_params.CompletionCreateParamsBase, CompletionBody),
        (embedding_params.EmbeddingCreateParams, EmbeddingBody),
        (response_params.ResponseCreateParamsBase, ResponsesBody),
        (message_create_params.MessageCreateParamsBase, MessagesBody),
        (message_count_tokens_params.MessageCountTokensParams, CountBody),
    ],
)
def test_every_parameter_of_the_official_clients_is_known(sent: Any, body: type[Body]) -> None:
    assert sent.__annotations__
    assert not set(sent.__annotations__) - {*body.__struct_encode_fields__, *body.refused}


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    fields: dict[str, Any] = {
        "user": "someone",
        "metadata": {"run": "1"},
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
        "store": False,
        "service_tier": "auto",
        "verbosity": "medium",
        "cache_prompt": True,
        "id_slot": 0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0,
        "typical_p": 1,
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "repeat_last_n": -1,
        "n_predict": -1,
        "timings_per_token": False,
        "grammar": "",
        "lora": [],
        "reasoning_format": "auto",
    }
    chat = {**CHAT, "parallel_tool_calls": True, "reasoning_effort": "medium", "modalities": ["text"], **fields}
    told = server.request("/v1/chat/completions", CHAT).json()["choices"][0]["message"]
    assert server.request("/v1/chat/completions", chat).json()["choices"][0]["message"] == told
    text = server.request("/v1/completions", TEXT).json()["choices"][0]["text"]
    assert server.request("/v1/completions", {**TEXT, **fields}).json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("store", True, "nothing is stored"),
        ("service_tier", "priority", "all requests are served alike"),
        ("web_search_options", {}, "this server does not have it"),
        ("repeat_penalty", 1.1, "use repetition_penalty"),
        ("n_predict", 10, "use max_tokens"),
        ("grammar", 'root ::= "a"', "use structured_outputs"),
        ("json_schema", {"type": "object"}, "use response_format"),
        ("samplers", ["top_k"], "they are always the same"),
        ("mirostat", 2, "use temperature"),
        ("timings_per_token", True, "POST /completion has them"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(server: Server, field: str, value: Any, words: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        refused = server.request(path, {**body, field: value})
        assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter"), path
        assert refused.error["param"] == field
        assert words in refused.error["message"]


def test_reasons_are_sentences(server: Server) -> None:
    document = server.request("/openapi.json").json()["components"]["schemas"]
    for name, (_, why) in REFUSED.items():
        assert why
        assert not why.endswith("."), name
        if name not in ("chat_template_content_format", "prediction", "verbosity"):  # chats have them
            assert document["ChatBody"]["properties"][name]["description"] == f"Not supported: {why}."
