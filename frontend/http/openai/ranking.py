"""`POST /score` and `POST /rerank`: similarities of texts, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

import asyncio
from typing import Annotated, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.errors import bad_request
from quire.frontend.http.openai.embeddings import EmbeddingUsage, PoolingBody, embed_all, usage_of_prompts
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.bodies import NOT_EMPTY, Refusals
from quire.frontend.http.transport.responses import json_response, new_id
from quire.frontend.similarity import num_pairs, score
from quire.protocol.messages import PoolingParams


class ScoreBody(PoolingBody, kw_only=True):
    """The body of a request for scores of pairs, with vLLM's fields."""

    refused: ClassVar[Refusals] = {
        "data_1": ((), "use text_1"),
        "data_2": ((), "use text_2"),
        "queries": ((), "use text_1"),
        "documents": ((), "use text_2"),
    }

    text_1: str | Annotated[list[str], NOT_EMPTY]
    text_2: str | Annotated[list[str], NOT_EMPTY]


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """The scores of all pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A text to rank."""

    text: str


class RerankBody(PoolingBody, kw_only=True):
    """The body of a request for a ranking, with the fields of Jina and Cohere."""

    refused: ClassVar[Refusals] = {
        "max_chunks_per_doc": ((), "use truncate_prompt_tokens, which keeps the last tokens of each text"),
        "max_tokens_per_doc": ((), "use truncate_prompt_tokens, which keeps the last tokens of each text"),
        "rank_fields": ((), "documents are texts, or objects with the only field text"),
    }

    query: str
    documents: Annotated[list[str | Document], NOT_EMPTY]
    top_n: int | None = None
    return_documents: bool | None = None


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document by its index in the request, and its score."""

    index: int
    document: Document | None = None
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    """The documents, the most similar first; of equal scores the first in the request."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class RankingEndpoints(Endpoints):
    """Handlers of the endpoints. A score is the cosine of the embeddings of two texts."""

    async def score(self, request: Request) -> Response:
        """Score pairs of texts: one with many, or each with the one of its index."""
        body = await self._service.read(request, ScoreBody)
        first, second = _texts(body.text_1), _texts(body.text_2)
        try:
            num_pairs(len(first), len(second))
        except ValueError as error:
            raise bad_request(str(error), "text_1") from None
        scores, usage = await self._scores(first, second, body, request)
        data = [ScoreData(index=index, score=value) for index, value in enumerate(scores)]
        name, created = self._service.name, self._service.now()
        return json_response(ScoreList(id=new_id("score"), created=created, model=name, data=data, usage=usage))

    async def rerank(self, request: Request) -> Response:
        """Sort documents by their similarity to a query."""
        body = await self._service.read(request, RerankBody)
        if body.top_n is not None and body.top_n < 0:
            raise bad_request(f"top_n is {body.top_n}; give the number of results, or 0 for all", "top_n")
        if not body.documents:
            raise bad_request("documents is an empty list; give at least one", "documents")
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        scores, usage = await self._scores([body.query], texts, body, request)
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        shown = body.return_documents is not False
        results = [
            RerankResult(index=i, document=Document(texts[i]) if shown else None, relevance_score=scores[i])
            for i in order
        ]
        return json_response(Ranking(id=new_id("rerank"), model=self._service.name, usage=usage, results=results))

    async def _scores(
        self, first: list[str], second: list[str], body: PoolingBody, request: Request
    ) -> tuple[list[float], EmbeddingUsage]:
        params = PoolingParams(pooling_type=body.pooling_type or "last")
        outputs = await embed_all(self._service, [*first, *second], params, body, request)
        left, right = outputs[: len(first)], outputs[len(first) :]
        scores = []
        for index, output in enumerate(right):
            scores.append(score(left[index if len(left) > 1 else 0], output).outputs.score)
            await asyncio.sleep(0)  # other requests go on between the pairs
        return scores, usage_of_prompts(outputs)


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given
