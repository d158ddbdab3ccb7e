"""`POST /api/generate` and `POST /api/chat` as the server has them: a request without a prompt may unload the model."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.dialects.ollama.body import GenerateBody, OllamaChatBody
from quire.frontend.http.dialects.ollama.endpoint import AnswerEndpoints
from quire.frontend.http.dialects.ollama.writer import UNLOADED, ChatAnswer, GeneratedText, OllamaAnswer, now
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.transport.responses import json_response


class OllamaServerEndpoints:
    """Handlers of the endpoints that answer with text, or with `keep_alive` 0 and no prompt unload the model."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def generate(self, request: Request) -> Response:
        """Answer a prompt with a `GeneratedText`, or with lines of it. An empty prompt checks and loads the model, or
        unloads it if `keep_alive` is 0.
        """
        model, body = await self._models.read(request, GenerateBody)
        if not body.prompt and self._unloads(model, body.keep_seconds):
            return _unloaded(GeneratedText, model.name if body.model is None else body.model)
        service = await self._models.hold(request, model, body.keep_seconds)
        return await service.endpoints(AnswerEndpoints).generate(request)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation with a `ChatAnswer`, or with lines of it. Without messages it checks and loads the
        model, or unloads it if `keep_alive` is 0.
        """
        model, body = await self._models.read(request, OllamaChatBody)
        if not body.messages and self._unloads(model, body.keep_seconds):
            return _unloaded(ChatAnswer, model.name if body.model is None else body.model)
        service = await self._models.hold(request, model, body.keep_seconds)
        return await service.endpoints(AnswerEndpoints).chat(request)

    def _unloads(self, model: ServedModel, keep_seconds: float | None) -> bool:
        """Unload a model if a request without a prompt asks for that; return whether it does."""
        if keep_seconds != 0 or not self._models.are_managed:
            return False
        self._models.loader.unload(model)
        return True


def _unloaded(kind: type[OllamaAnswer], name: str) -> Response:
    return json_response(kind(model=name, created_at=now(), done=True, done_reason=UNLOADED))
