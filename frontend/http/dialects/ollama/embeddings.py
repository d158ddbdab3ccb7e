"""`POST /api/embed`, and the older `POST /api/embeddings`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.dialects.ollama.body import OllamaBody, OllamaEmbedBody, OllamaEmbeddingsBody
from quire.frontend.http.dialects.ollama.names import answered_name
from quire.frontend.http.dialects.ollama.options import read_options
from quire.frontend.http.dialects.ollama.writer import nanoseconds
from quire.frontend.http.errors import bad_request
from quire.frontend.http.openai.embeddings import PoolingBody, embed_all
from quire.frontend.http.server_state import load_seconds
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.responses import json_response
from quire.frontend.outputs import EmbeddingRequestOutput
from quire.protocol.messages import PoolingParams

_AS_MUCH_AS_FITS = -1


class EmbeddedTexts(msgspec.Struct, kw_only=True):
    """The vectors of all texts, of length 1. Durations are nanoseconds, `load_duration` that of waiting."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedText(msgspec.Struct):
    """The vector of one text; empty without a text."""

    embedding: list[float]


class EmbedEndpoints(Endpoints):
    """Handlers of the endpoints that answer with vectors."""

    async def embed(self, request: Request) -> Response:
        """Turn texts into vectors of length 1. Without a text it only checks the model."""
        began = time.monotonic() - load_seconds(request)
        body = await self._service.read(request, OllamaEmbedBody)
        name = self._checked(body, request)
        texts = [body.input] if isinstance(body.input, str) else body.input
        given = [] if texts == [""] else texts
        params = PoolingParams(dimensions=body.dimensions, normalize=True)
        outputs = await self._vectors(given, params, body.truncate is not False, request)
        starts = [each.metrics.first_scheduled_time for each in outputs]
        answer = EmbeddedTexts(
            model=name,
            embeddings=[output.outputs.embedding for output in outputs],
            total_duration=nanoseconds(began, time.monotonic()),
            load_duration=nanoseconds(began, min((start for start in starts if start is not None), default=None)),
            prompt_eval_count=sum(len(output.prompt_token_ids) for output in outputs),
        )
        return json_response(answer)

    async def embeddings(self, request: Request) -> Response:
        """Turn a text into a vector. An older form of /api/embed, without its scaling to length 1."""
        body = await self._service.read(request, OllamaEmbeddingsBody)
        self._checked(body, request)
        outputs = await self._vectors([body.prompt] if body.prompt else [], PoolingParams(), True, request)
        return json_response(EmbeddedText(outputs[0].outputs.embedding if outputs else []))

    def _checked(self, body: OllamaBody, request: Request) -> str:
        """Return the model's name for the answer. Raises `ApiError` or `ValueError`."""
        self._service.timeout(request)
        if body.options is not None:
            read_options(body.options)[0].check()
        return answered_name(self._service, body.model)

    async def _vectors(
        self, texts: Sequence[str], params: PoolingParams, truncates: bool, request: Request
    ) -> list[EmbeddingRequestOutput]:
        if not texts:
            return []
        if "" in texts:
            raise bad_request(f"input[{list(texts).index('')}] is empty; give some text, or leave it out", "input")
        options = PoolingBody(truncate_prompt_tokens=_AS_MUCH_AS_FITS if truncates else None)
        return await embed_all(self._service, list(texts), params, options, request)
