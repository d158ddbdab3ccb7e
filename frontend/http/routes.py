"""The table of all endpoints, with the types that `/openapi.json` describes."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from quire.frontend.http.dialects.registry import DIALECTS
from quire.frontend.http.documentation.openapi import Documentation
from quire.frontend.http.documentation.operation import AnswerTypes, Operation
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
from quire.frontend.http.operations.endpoints import (
    DetokenizeBody,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    OperatorEndpoints,
    TokenizeBody,
    Tokens,
    Version,
)
from quire.frontend.http.operations.engines import AddEngineBody, EngineEndpoints, EngineList, RemoveEngineBody
from quire.frontend.http.operations.view import EngineView, page_routes, view_routes
from quire.frontend.http.operations.vllm_state import ServerInfo, ServerLoad, VllmStateEndpoints
from quire.frontend.http.service import ModelService
from quire.frontend.metrics.recent import RecentRates

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")  # the last two are llama.cpp's


_ALL_METHODS = ["GET", "POST", "DELETE"]


def routes(service: ModelService) -> list[Route]:
    """Return all routes in the order of `/openapi.json`, which documents every `Operation`."""
    recent = RecentRates()
    service.llm.add_observer(recent)
    view = EngineView(service.llm, recent, lambda: service.draining, service.args.shows_prompts())
    table = [*_openai(service), *_ranking(service)]
    for dialect in DIALECTS:
        table += dialect.routes(service)
    table += _operator(service)
    table += page_routes()
    table += view_routes(view, service.stream)
    table += Documentation(service, table).routes()
    return table


def _openai(service: ModelService) -> list[Route]:
    responses = ResponsesEndpoint(service)
    return [
        Operation(
            "/v1/chat/completions",
            ChatEndpoint(service).create,
            AnswerTypes(ChatCompletion, events=[ChatChunk], ends_with_done=True),
            body=ChatBody,
            generates=True,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}], "max_tokens": 60},
        ),
        Operation(
            "/v1/completions",
            CompletionsEndpoint(service).create,
            AnswerTypes(TextCompletion, events=[TextCompletion], ends_with_done=True),
            body=CompletionBody,
            generates=True,
            example={"prompt": "Once upon a time", "max_tokens": 60},
        ),
        Operation(
            "/v1/embeddings",
            EmbeddingsEndpoint(service).create,
            AnswerTypes(EmbeddingList),
            body=EmbeddingBody,
            generates=True,
            example={"input": ["Once upon a time", "There was once a fox"]},
        ),
        Operation(
            "/v1/responses",
            responses.create,
            AnswerTypes(Response, events=RESPONSE_EVENTS),
            body=ResponsesBody,
            generates=True,
            example={"input": "Tell me a tale.", "max_output_tokens": 60},
        ),
        Route("/v1/conversations{rest:path}", responses.conversations, methods=_ALL_METHODS, include_in_schema=False),
        *(_no_stored_responses(responses) if service.responses is None else _stored_responses(responses)),
    ]


def _no_stored_responses(responses: ResponsesEndpoint) -> list[Route]:
    return [Route("/v1/responses/{id:path}", responses.stored, methods=_ALL_METHODS, include_in_schema=False)]


def _stored_responses(responses: ResponsesEndpoint) -> list[Route]:
    path = "/v1/responses/{id}"
    return [
        Operation(f"{path}/input_items", responses.input_items, AnswerTypes(InputItems, errors=[400, 404, 503])),
        Route(f"{path}/cancel", responses.cancel, methods=["POST"], include_in_schema=False),
        Operation(path, responses.retrieve, AnswerTypes(Response, errors=[400, 404, 503])),
        Operation(path, responses.delete, AnswerTypes(DeletedResponse, errors=[404, 503]), methods=["DELETE"]),
    ]


def _ranking(service: ModelService) -> list[Route]:
    endpoints, pooling = RankingEndpoints(service), PoolingEndpoints(service)
    text = {"input": "The fox sleeps."}
    pair = {"text_1": "A fox", "text_2": ["The fox sleeps.", "The king had a daughter."]}
    query = {"query": "A fox", "documents": ["The king had a daughter.", "The fox sleeps."], "top_n": 1}
    return [
        *(
            Operation(path, endpoints.score, AnswerTypes(ScoreList), body=ScoreBody, generates=True, example=pair)
            for path in ("/score", "/v1/score")
        ),
        *(
            Operation(path, endpoints.rerank, AnswerTypes(Ranking), body=RerankBody, generates=True, example=query)
            for path in RERANK_PATHS
        ),
        *(
            Operation(
                path, pooling.classify, AnswerTypes(ClassificationList), body=ClassifyBody, generates=True, example=text
            )
            for path in ("/classify", "/v1/classify")
        ),
        *(
            Operation(path, pooling.pool, AnswerTypes(PooledList), body=PoolBody, generates=True, example=text)
            for path in ("/pooling", "/v1/pooling")
        ),
    ]


def _operator(service: ModelService) -> list[Route]:
    endpoints, state, engines = OperatorEndpoints(service), VllmStateEndpoints(service), EngineEndpoints(service)
    return [
        *(Operation(path, endpoints.models, AnswerTypes(ModelList)) for path in ("/v1/models", "/models")),
        Operation("/v1/models/{name:path}", endpoints.model, AnswerTypes(ModelCard, errors=[404])),
        Operation(
            "/tokenize",
            endpoints.tokenize,
            AnswerTypes(Tokens),
            body=TokenizeBody,
            example={"prompt": "Once upon a time"},
        ),
        Operation(
            "/detokenize",
            endpoints.detokenize,
            AnswerTypes(Detokenized),
            body=DetokenizeBody,
            example={"tokens": [1, 2, 3]},
        ),
        *(Operation(path, endpoints.health, AnswerTypes(Health, errors=[503])) for path in ("/health", "/v1/health")),
        Operation("/ready", endpoints.ready, AnswerTypes(Health, errors=[503])),
        Operation("/ping", endpoints.ping, AnswerTypes(Health, errors=[503])),
        Operation("/version", endpoints.version, AnswerTypes(Version)),
        Operation("/engines", engines.list, AnswerTypes(EngineList)),
        Operation(
            "/engines",
            engines.add,
            AnswerTypes(EngineList, errors=[400, 403]),
            body=AddEngineBody,
            example={"address": "ipc:///run/quire/second.sock"},
        ),
        Operation(
            "/engines/{number}/drain",
            engines.drain,
            AnswerTypes(EngineList, errors=[403, 404, 409]),
            methods=["POST"],
        ),
        Operation(
            "/engines/{number}/remove",
            engines.remove,
            AnswerTypes(EngineList, errors=[400, 403, 404, 409]),
            body=RemoveEngineBody,
            example={"drain_timeout": 30},
        ),
        Operation("/load", state.load, AnswerTypes(ServerLoad)),
        Operation("/server_info", state.server_info, AnswerTypes(ServerInfo, errors=[400])),
        Operation("/tokenizer_info", state.tokenizer_info, AnswerTypes(dict[str, Any], errors=[400])),
        Operation(
            "/metrics", endpoints.metrics, AnswerTypes(media_types=["text/plain", "application/openmetrics-text"])
        ),
    ]
