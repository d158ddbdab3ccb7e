"""`POST /classify` and `POST /pooling`: scores of labels, and the vectors of any task, in vLLM's shapes."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.openai.completions import GivenPrompts, prompts_of
from quire.frontend.http.openai.embeddings import (
    TRUNCATION,
    EmbeddingUsage,
    PoolingBody,
    embed_all,
    usage_of_prompts,
    written,
)
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.bodies import Refusals
from quire.frontend.http.transport.responses import encoded, json_response, new_id
from quire.frontend.turns import in_turns
from quire.protocol.messages import PoolingParams


class ClassifyBody(PoolingBody, kw_only=True):
    """The body of a request for scores of labels, with vLLM's fields."""

    refused: ClassVar[Refusals] = {
        "messages": ((), "use input; POST /tokenize writes a conversation as token ids"),
        "task": (("classify",), "use POST /v1/embeddings or POST /pooling for other tasks"),
        "truncation_side": TRUNCATION,
    }

    input: GivenPrompts
    use_activation: bool | None = None


class Classification(msgspec.Struct, kw_only=True):
    """The scores of one text, and the label that has the highest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    """The scores of all texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class PoolBody(PoolingBody, kw_only=True):
    """The body of a request for vectors of any task, with vLLM's fields."""

    refused: ClassVar[Refusals] = {
        "embed_dtype": (("float32",), "vectors are float32"),
        "messages": ((), "use input; POST /tokenize writes a conversation as token ids"),
        "truncation_side": TRUNCATION,
    }

    input: GivenPrompts
    task: Literal["embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    pooling_type: Literal["last", "mean", "cls", "max"] | None = None
    prompt_name: str | None = None
    use_activation: bool | None = None


class PooledData(msgspec.Struct, kw_only=True):
    """One text's vector, as a list or as base64 of little-endian float32."""

    index: int
    object: str = "pooling"
    data: list[float] | str


class PooledList(msgspec.Struct, kw_only=True):
    """The vectors of all texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: EmbeddingUsage


class PoolingEndpoints(Endpoints):
    """Handlers of the endpoints."""

    async def classify(self, request: Request) -> Response:
        """Score texts by the labels of the model."""
        service = self._service
        body = await service.read(request, ClassifyBody)
        params = PoolingParams(task="classify", use_activation=body.use_activation)
        outputs = await embed_all(service, await prompts_of(body.input, "input"), params, body, request, field="input")
        labels = service.llm.pooling_info.labels
        data = []
        async for index, output in in_turns(enumerate(outputs)):
            probs = output.outputs.embedding
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append(encoded(Classification(index=index, label=label, probs=probs, num_classes=len(probs))))
        answer = ClassificationList(
            id=new_id("classify"),
            created=service.now(),
            model=service.name,
            data=data,
            usage=usage_of_prompts(outputs),
        )
        return json_response(answer)

    async def pool(self, request: Request) -> Response:
        """Turn texts into vectors: embeddings, or the scores of labels if the model gives no embeddings."""
        service = self._service
        body = await service.read(request, PoolBody)
        params = PoolingParams(
            task=body.task or ("embed" if service.llm.pooling_info.embeds else "classify"),
            pooling_type=body.pooling_type,
            dimensions=body.dimensions,
            normalize=body.normalize,
            use_activation=body.use_activation,
        )
        prompts = await prompts_of(body.input, "input")
        outputs = await embed_all(service, prompts, params, body, request, body.prompt_name, "input")
        data = [
            encoded(PooledData(index=index, data=written(output, body.encoding_format)))
            async for index, output in in_turns(enumerate(outputs))
        ]
        answer = PooledList(
            id=new_id("pool"), created=service.now(), model=service.name, data=data, usage=usage_of_prompts(outputs)
        )
        return json_response(answer)
