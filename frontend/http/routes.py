"""The table of all endpoints, with the types that `/openapi.json` describes."""

from __future__ import annotations

import functools
from typing import Any

from starlette.routing import Route

from quire.frontend.http.dialects.registry import DIALECTS
from quire.frontend.http.documentation.openapi import Documentation
from quire.frontend.http.documentation.operation import AnswerTypes, ModelOperation, Operation
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.openai.chat import ChatBody, ChatChunk, ChatCompletion, ChatEndpoint
from quire.frontend.http.openai.completions import CompletionBody, CompletionsEndpoint, TextCompletion
from quire.frontend.http.openai.embeddings import EmbeddingBody, EmbeddingList, EmbeddingsEndpoint
from quire.frontend.http.openai.pooling import ClassificationList, ClassifyBody, PoolBody, PooledList, PoolingEndpoints
from quire.frontend.http.openai.ranking import Ranking, RankingEndpoints, RerankBody, ScoreBody, ScoreList
from quire.frontend.http.openai.responses.body import ResponsesBody
from quire.frontend.http.openai.responses.endpoint import ResponsesEndpoint
from quire.frontend.http.openai.responses.history import DeletedResponse, InputItems
from quire.frontend.http.openai.responses.response import EVENTS as RESPONSE_EVENTS
from quire.frontend.http.openai.responses.response import Response
from quire.frontend.http.openai.responses.stored import StoredResponsesEndpoints
from quire.frontend.http.operations.adapters import AdapterEndpoints, LoadAdapterBody, UnloadAdapterBody
from quire.frontend.http.operations.endpoints import (
    Health,
    ModelCard,
    ModelList,
    OperatorEndpoints,
    Version,
)
from quire.frontend.http.operations.engines import (
    AddEngineBody,
    DrainEngineBody,
    EngineEndpoints,
    EngineList,
    RemoveEngineBody,
)
from quire.frontend.http.operations.tokens import DetokenizeBody, Detokenized, TokenEndpoints, TokenizeBody, Tokens
from quire.frontend.http.operations.view import page_routes, view_routes
from quire.frontend.http.operations.vllm_state import ServerInfo, ServerLoad, VllmStateEndpoints, load_handler

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")  # the last two are llama.cpp's


_ALL_METHODS = ["GET", "POST", "DELETE"]


def routes(models: ServedModels) -> list[Route]:
    """Return all routes in the order of `/openapi.json`, which documents every `Operation`."""
    table = [*_openai(models), *_ranking(models)]
    for dialect in DIALECTS:
        table += dialect.routes(models)
    table += _operator(models)
    table += page_routes()
    table += view_routes(models)
    table += Documentation(models, table).routes()
    return table


def _openai(models: ServedModels) -> list[Route]:
    server, stored = models.server, StoredResponsesEndpoints(models.server)
    return [
        ModelOperation(
            models,
            "/v1/chat/completions",
            ChatEndpoint,
            ChatEndpoint.create,
            AnswerTypes(ChatCompletion, events=[ChatChunk], ends_with_done=True),
            body=ChatBody,
            generates=True,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}], "max_tokens": 60},
        ),
        ModelOperation(
            models,
            "/v1/completions",
            CompletionsEndpoint,
            CompletionsEndpoint.create,
            AnswerTypes(TextCompletion, events=[TextCompletion], ends_with_done=True),
            body=CompletionBody,
            generates=True,
            example={"prompt": "Once upon a time", "max_tokens": 60},
        ),
        ModelOperation(
            models,
            "/v1/embeddings",
            EmbeddingsEndpoint,
            EmbeddingsEndpoint.create,
            AnswerTypes(EmbeddingList),
            body=EmbeddingBody,
            generates=True,
            example={"input": ["Once upon a time", "There was once a fox"]},
        ),
        ModelOperation(
            models,
            "/v1/responses",
            ResponsesEndpoint,
            ResponsesEndpoint.create,
            AnswerTypes(Response, events=RESPONSE_EVENTS),
            body=ResponsesBody,
            generates=True,
            example={"input": "Tell me a tale.", "max_output_tokens": 60},
        ),
        Route("/v1/conversations{rest:path}", stored.conversations, methods=_ALL_METHODS, include_in_schema=False),
        *(_no_stored_responses(stored) if server.responses is None else _stored_responses(stored)),
    ]


def _no_stored_responses(responses: StoredResponsesEndpoints) -> list[Route]:
    return [Route("/v1/responses/{id:path}", responses.stored, methods=_ALL_METHODS, include_in_schema=False)]


def _stored_responses(responses: StoredResponsesEndpoints) -> list[Route]:
    path = "/v1/responses/{id}"
    return [
        Operation(f"{path}/input_items", responses.input_items, AnswerTypes(InputItems, errors=[400, 404, 503])),
        Route(f"{path}/cancel", responses.cancel, methods=["POST"], include_in_schema=False),
        Operation(path, responses.retrieve, AnswerTypes(Response, errors=[400, 404, 503])),
        Operation(path, responses.delete, AnswerTypes(DeletedResponse, errors=[404, 503]), methods=["DELETE"]),
    ]


def _ranking(models: ServedModels) -> list[Route]:
    text = {"input": "The fox sleeps."}
    pair = {"text_1": "A fox", "text_2": ["The fox sleeps.", "The king had a daughter."]}
    query = {"query": "A fox", "documents": ["The king had a daughter.", "The fox sleeps."], "top_n": 1}
    operation = functools.partial(ModelOperation, models, generates=True)
    ranker, pooler = RankingEndpoints, PoolingEndpoints
    scores, ranking = AnswerTypes(ScoreList), AnswerTypes(Ranking)
    classes, vectors = AnswerTypes(ClassificationList), AnswerTypes(PooledList)
    return [
        *(
            operation(path, ranker, ranker.score, scores, body=ScoreBody, example=pair)
            for path in ("/score", "/v1/score")
        ),
        *(operation(path, ranker, ranker.rerank, ranking, body=RerankBody, example=query) for path in RERANK_PATHS),
        *(
            operation(path, pooler, pooler.classify, classes, body=ClassifyBody, example=text)
            for path in ("/classify", "/v1/classify")
        ),
        *(
            operation(path, pooler, pooler.pool, vectors, body=PoolBody, example=text)
            for path in ("/pooling", "/v1/pooling")
        ),
    ]


def _operator(models: ServedModels) -> list[Route]:
    endpoints = OperatorEndpoints(models)
    return [
        *(Operation(path, endpoints.models, AnswerTypes(ModelList)) for path in ("/v1/models", "/models")),
        Operation("/v1/models/{name:path}", endpoints.model, AnswerTypes(ModelCard, errors=[404])),
        ModelOperation(
            models,
            "/tokenize",
            TokenEndpoints,
            TokenEndpoints.tokenize,
            AnswerTypes(Tokens),
            body=TokenizeBody,
            example={"prompt": "Once upon a time"},
        ),
        ModelOperation(
            models,
            "/detokenize",
            TokenEndpoints,
            TokenEndpoints.detokenize,
            AnswerTypes(Detokenized),
            body=DetokenizeBody,
            example={"tokens": [1, 2, 3]},
        ),
        *(Operation(path, endpoints.health, AnswerTypes(Health, errors=[503])) for path in ("/health", "/v1/health")),
        Operation("/ready", endpoints.ready, AnswerTypes(Health, errors=[503])),
        Operation("/ping", endpoints.ping, AnswerTypes(Health, errors=[503])),
        Operation("/version", endpoints.version, AnswerTypes(Version)),
        *_engines(models),
        *_adapters(models),
        Operation("/load", load_handler(models), AnswerTypes(ServerLoad)),
        ModelOperation(
            models,
            "/server_info",
            VllmStateEndpoints,
            VllmStateEndpoints.server_info,
            AnswerTypes(ServerInfo, errors=[400, 404, 503]),
        ),
        ModelOperation(
            models,
            "/tokenizer_info",
            VllmStateEndpoints,
            VllmStateEndpoints.tokenizer_info,
            AnswerTypes(dict[str, Any], errors=[400, 404, 503]),
        ),
        Operation(
            "/metrics", endpoints.metrics, AnswerTypes(media_types=["text/plain", "application/openmetrics-text"])
        ),
    ]


def _adapters(models: ServedModels) -> list[Route]:
    endpoints, text = AdapterEndpoints(models), AnswerTypes(media_types=["text/plain"], errors=[403])
    name, path = {"lora_name": "tales"}, {"lora_path": "/adapters/tales"}
    return [
        Operation("/v1/load_lora_adapter", endpoints.load, text, body=LoadAdapterBody, example=name | path),
        Operation("/v1/unload_lora_adapter", endpoints.unload, text, body=UnloadAdapterBody, example=name),
    ]


def _engines(models: ServedModels) -> list[Route]:
    return [
        ModelOperation(models, "/engines", EngineEndpoints, EngineEndpoints.list, AnswerTypes(EngineList)),
        ModelOperation(
            models,
            "/engines",
            EngineEndpoints,
            EngineEndpoints.add,
            AnswerTypes(EngineList, errors=[403]),
            body=AddEngineBody,
            example={"address": "ipc:///run/quire/second.sock"},
        ),
        ModelOperation(
            models,
            "/engines/{number}/drain",
            EngineEndpoints,
            EngineEndpoints.drain,
            AnswerTypes(EngineList, errors=[403, 409]),
            body=DrainEngineBody,
        ),
        ModelOperation(
            models,
            "/engines/{number}/remove",
            EngineEndpoints,
            EngineEndpoints.remove,
            AnswerTypes(EngineList, errors=[403, 409]),
            body=RemoveEngineBody,
            example={"drain_timeout": 30},
        ),
    ]
