"""`POST /score` and `POST /rerank`: similarities of texts, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

import functools
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.errors import bad_request
from quire.frontend.http.openai.embeddings import (
    TRUNCATION,
    EmbeddingUsage,
    PoolingBody,
    embed_all,
    pool_all,
    usage_of_prompts,
)
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.bodies import NOT_EMPTY, Refusals
from quire.frontend.http.transport.responses import json_response, new_id
from quire.frontend.pair_scores import pair_of, pair_params, pair_score, reads_pairs, similarity_params
from quire.frontend.similarity import num_pairs, score
from quire.frontend.text.pooled import document_prompt_name, query_prompt_name
from quire.frontend.turns import in_turns
from quire.protocol.messages import PoolingParams


class Side(NamedTuple):
    """The texts on one side of pairs, and the field that they are in, as a list or as the only one."""

    field: str
    texts: list[str]
    is_list: bool

    def check(self) -> None:
        """Raise `ApiError` 400 that names a text that is empty."""
        if "" in self.texts:
            place = f"{self.field}[{self.texts.index('')}]" if self.is_list else self.field
            raise bad_request(f"{place} is empty; give some text, or leave it out", place)


class PairBody(PoolingBody, kw_only=True):
    """Fields of all requests for scores of pairs.

    `instruction` is for a reranker that was trained with one, `use_activation` for a model that reads pairs, and
    `pooling_type` for one whose embeddings are compared.
    """

    instruction: str | None = None
    use_activation: bool | None = None
    pooling_type: Literal["last", "mean", "cls", "max"] | None = None


_Texts = str | Annotated[list[str], NOT_EMPTY]


class ScoreBody(PairBody, kw_only=True):
    """The body of a request for scores of pairs, with vLLM's fields, which give each side three names."""

    refused: ClassVar[Refusals] = {"items": ((), "use text_2"), "truncation_side": TRUNCATION}

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None

    def sides(self) -> tuple[Side, Side]:
        """Return both sides of the pairs. Raises `ApiError` 400 unless each side is given once."""
        return (
            _side({"text_1": self.text_1, "queries": self.queries, "data_1": self.data_1}),
            _side({"text_2": self.text_2, "documents": self.documents, "data_2": self.data_2}),
        )


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


class RerankBody(PairBody, kw_only=True):
    """The body of a request for a ranking, with the fields of Jina and Cohere."""

    refused: ClassVar[Refusals] = {
        "max_chunks_per_doc": ((), "use truncate_prompt_tokens, which bounds the tokens of each pair"),
        "max_tokens_per_doc": ((), "use truncate_prompt_tokens, which bounds the tokens of each pair"),
        "rank_fields": ((), "documents are texts, or objects with the only field text"),
        "truncation_side": TRUNCATION,
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
    """Handlers of the endpoints.

    A score is what a cross-encoder or a reranker makes of a pair, or the similarity of the embeddings of two texts.
    """

    async def score(self, request: Request) -> Response:
        """Score pairs of texts: one with many, or each with the one of its index."""
        body = await self._service.read(request, ScoreBody)
        first, second = body.sides()
        try:
            num_pairs(len(first.texts), len(second.texts))
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
        query, documents = Side("query", [body.query], False), Side("documents", texts, True)
        scores, usage = await self._scores(query, documents, body, request)
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        shown = body.return_documents is not False
        results = [
            RerankResult(index=i, document=Document(texts[i]) if shown else None, relevance_score=scores[i])
            for i in order
        ]
        return json_response(Ranking(id=new_id("rerank"), model=self._service.name, usage=usage, results=results))

    async def _scores(
        self, first: Side, second: Side, body: PairBody, request: Request
    ) -> tuple[list[float], EmbeddingUsage]:
        model = self._service.llm.pooling_info
        try:
            params = None if reads_pairs(model) else similarity_params(model, _params_of(body), body.instruction)
        except ValueError as error:
            raise bad_request(str(error), "model") from None
        if params is None:
            return await self._scores_of_pairs(first, second, body, request)
        self._service.check_texts(len(first.texts) + len(second.texts))
        first.check()
        second.check()
        names = query_prompt_name(model), document_prompt_name(model)
        left, right = [
            await embed_all(self._service, side.texts, params, body, request, name, field=side.field)
            for side, name in zip((first, second), names, strict=True)
        ]
        scores = []
        async for index, output in in_turns(enumerate(right)):
            scores.append(score(left[index if len(left) > 1 else 0], output, model.similarity).outputs.score)
        return scores, usage_of_prompts([*left, *right])

    async def _scores_of_pairs(
        self, first: Side, second: Side, body: PairBody, request: Request
    ) -> tuple[list[float], EmbeddingUsage]:
        pairs = [pair_of(first.texts, second.texts, index) for index in range(len(second.texts))]
        self._service.check_texts(len(pairs), sum(len(text) for pair in pairs for text in pair))
        first.check()
        second.check()
        make = functools.partial(
            self._service.llm.pair_prompts,
            pairs,
            instruction=body.instruction,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )
        params = pair_params(_params_of(body))
        outputs = await pool_all(self._service, len(pairs), make, params, body, request, second.field)
        return [pair_score(output).outputs.score for output in outputs], usage_of_prompts(outputs)


def _params_of(body: PairBody) -> PoolingParams:
    return PoolingParams(pooling_type=body.pooling_type, use_activation=body.use_activation)


def _side(names: dict[str, _Texts | None]) -> Side:
    given = {name: texts for name, texts in names.items() if texts is not None}
    if len(given) != 1:
        name, *others = names
        what = f"{' and '.join(given)} are the same" if given else f"{name} is missing"
        raise bad_request(f"{what}; give {name}, or in its place {' or '.join(others)}", name)
    [(name, texts)] = given.items()
    return Side(name, [texts] if isinstance(texts, str) else texts, isinstance(texts, list))
