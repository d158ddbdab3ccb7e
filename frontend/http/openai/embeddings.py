"""`POST /v1/embeddings`: turn texts into vectors."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.openai.completions import prompts_of
from quire.frontend.http.service import Endpoints, ModelService
from quire.frontend.http.transport.bodies import NOT_EMPTY, Body, Refusals
from quire.frontend.http.transport.responses import json_response
from quire.frontend.http.transport.sse import cancelled_on_disconnect
from quire.frontend.outputs import EmbeddingRequestOutput
from quire.protocol.messages import PoolingParams, SamplingParams


class PoolingBody(Body, kw_only=True):
    """Fields of all requests whose texts become vectors, under vLLM's names."""

    pooling_type: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None


class EmbeddingBody(PoolingBody, kw_only=True):
    """The body of an embedding request, with OpenAI's and vLLM's fields."""

    refused: ClassVar[Refusals] = {
        "embed_dtype": (("float32",), "embeddings are float32"),
        "messages": ((), "use input; POST /tokenize writes a conversation as token ids"),
        "request_id": ((), "this answer has no id; use the header X-Request-Id to name a request"),
        "task": (("embed",), "only embeddings are supported"),
        "truncation_side": (("left",), "truncate_prompt_tokens keeps the last tokens"),
    }

    input: str | Annotated[list[str | int | list[int]], NOT_EMPTY]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class EmbeddingData(msgspec.Struct, kw_only=True):
    """One text's vector, as a list or as base64 of little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Token counts of all texts."""

    prompt_tokens: int
    total_tokens: int


def usage_of_prompts(outputs: Iterable[EmbeddingRequestOutput]) -> EmbeddingUsage:
    """Return the tokens of all texts."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingUsage(tokens, tokens)


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The vectors of all texts."""

    object: str = "list"
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


async def embed_all(
    service: ModelService, prompts: list[str | list[int]], params: PoolingParams, body: PoolingBody, request: Request
) -> list[EmbeddingRequestOutput]:
    """Return the embeddings of all prompts of a body; if one fails, or the client leaves, abort the others."""
    service.check_count(len(prompts), SamplingParams())
    special = body.add_special_tokens is not False
    async with cancelled_on_disconnect(request.receive):
        ready = await service.prepared(prompts, body.truncate_prompt_tokens, special)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        service.llm.embed(
                            prompt,
                            params,
                            truncate_prompt_tokens=body.truncate_prompt_tokens,
                            add_special_tokens=special,
                            priority=body.priority or 0,
                            cache_salt=body.cache_salt or "",
                            timeout=service.timeout(request),
                            tenant=service.tenant(request),
                            trace=TraceContext("embeddings", request.headers),
                        )
                    )
                    for prompt in ready
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class EmbeddingsEndpoint(Endpoints):
    """Handler of the endpoint."""

    async def create(self, request: Request) -> Response:
        """Turn texts into vectors. The answer is an `EmbeddingList`."""
        service = self._service
        body = await service.read(request, EmbeddingBody)
        params = PoolingParams(
            pooling_type=body.pooling_type or "last", dimensions=body.dimensions, normalize=body.normalize is not False
        )
        outputs = await embed_all(service, prompts_of(body.input, "input"), params, body, request)
        usage = usage_of_prompts(outputs)
        data = [
            EmbeddingData(index=index, embedding=_written(output, body.encoding_format))
            for index, output in enumerate(outputs)
        ]
        return json_response(EmbeddingList(data=data, model=service.name, usage=usage))


def _written(output: EmbeddingRequestOutput, encoding: str | None) -> list[float] | str:
    values = output.outputs.embedding
    return values if encoding != "base64" else base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
