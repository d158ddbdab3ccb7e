"""`POST /v1/embeddings`: turn texts into vectors."""

from __future__ import annotations

import base64
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.errors import errors_at
from quire.frontend.http.generation import results_of
from quire.frontend.http.openai.completions import GivenPrompts, prompts_of
from quire.frontend.http.service import Endpoints, ModelService
from quire.frontend.http.transport.bodies import Body, Refusals
from quire.frontend.http.transport.responses import encoded, json_response
from quire.frontend.http.transport.sse import cancelled_on_disconnect
from quire.frontend.outputs import EmbeddingRequestOutput
from quire.frontend.text.prompts import Prompt
from quire.frontend.turns import in_turns
from quire.protocol.messages import PoolingParams

TRUNCATION = ((), "a decoder keeps the last tokens of a text, an encoder the first ones")
"""The values that `truncation_side` may have, and why no others."""


class PoolingBody(Body, kw_only=True):
    """Fields of all requests whose texts become vectors, under vLLM's names."""

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
        "task": (("embed",), "use POST /classify or POST /pooling for other tasks"),
        "truncation_side": TRUNCATION,
    }

    input: GivenPrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    pooling_type: Literal["last", "mean", "cls", "max"] | None = None
    prompt_name: str | None = None


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
    service: ModelService,
    prompts: Sequence[str | Sequence[int]],
    params: PoolingParams,
    body: PoolingBody,
    request: Request,
    prompt_name: str | None = None,
    *,
    field: str = "input",
) -> list[EmbeddingRequestOutput]:
    """Return the vectors of the prompts in a body's `field`, whose texts follow an instruction of the model."""

    def make() -> Awaitable[list[Prompt]]:
        return service.llm.pooled_prompts(
            prompts,
            prompt_name=prompt_name if params.task == "embed" else "",
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )

    return await pool_all(service, len(prompts), make, params, body, request, field)


async def pool_all(
    service: ModelService,
    count: int,
    make: Callable[[], Awaitable[list[Prompt]]],
    params: PoolingParams,
    body: PoolingBody,
    request: Request,
    field: str,
) -> list[EmbeddingRequestOutput]:
    """Return the vectors of the `count` prompts that `make` gives; if one fails, or the client leaves, abort all.

    `field` is that of their texts in the body.
    """
    service.check_texts(count)
    async with cancelled_on_disconnect(request.receive):
        options: dict[str, Any] = {
            "priority": body.priority or 0,
            **service.terms(request, body.cache_salt, body.user),
            "trace": TraceContext("embeddings", request.headers),
        }
        with errors_at(field):
            prompts = await make()

        async def vector(index: int, prompt: Prompt) -> EmbeddingRequestOutput:
            with errors_at(field, index if count > 1 else None):
                return await service.llm.embed(prompt, params, **options)

        return await results_of(vector(index, prompt) for index, prompt in enumerate(prompts))


class EmbeddingsEndpoint(Endpoints):
    """Handler of the endpoint."""

    async def create(self, request: Request) -> Response:
        """Turn texts into vectors. The answer is an `EmbeddingList`."""
        service = self._service
        body = await service.read(request, EmbeddingBody)
        params = PoolingParams(pooling_type=body.pooling_type, dimensions=body.dimensions, normalize=body.normalize)
        prompts = await prompts_of(body.input, "input")
        outputs = await embed_all(service, prompts, params, body, request, body.prompt_name)
        usage = usage_of_prompts(outputs)
        data = [
            encoded(EmbeddingData(index=index, embedding=written(output, body.encoding_format)))
            async for index, output in in_turns(enumerate(outputs))
        ]
        return json_response(EmbeddingList(data=data, model=service.name, usage=usage))


def written(output: EmbeddingRequestOutput, encoding: str | None) -> list[float] | str:
    """Return the vector as a list, or as base64 of little-endian float32."""
    values = output.outputs.embedding
    return values if encoding != "base64" else base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
