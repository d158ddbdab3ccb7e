"""The endpoints that describe models, and those that would make, change or remove some."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.dialects.ollama.body import PullBody, ShowBody
from quire.frontend.http.dialects.ollama.described_model import DescribedModel, ModelDetails
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.server_state import now
from quire.frontend.http.service import ModelFacts, ModelService, with_tag
from quire.frontend.http.transport.responses import json_response
from quire.frontend.http.transport.sse import JSON_LINES

COVERED_VERSION = "0.12.6"
"""The version of Ollama whose API this is; clients compare it with the one that they need."""

_NEVER = "2318-01-01T00:00:00Z"  # when a model without a time to leave expires, as Ollama says it


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API this is."""

    version: str = COVERED_VERSION


class ListedModel(msgspec.Struct, kw_only=True):
    """A model under one of its names. `modified_at`: the server's start; `digest` changes with model and tokenizer.

    `size`: bytes of the files of weights, 0 if they are on another machine.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ListedModels(msgspec.Struct):
    """Each model under each of its names."""

    models: list[ListedModel]


class RunningModel(msgspec.Struct, kw_only=True):
    """A loaded model. `expires_at`: when it will be unloaded if no further request comes; far away if it stays."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str = _NEVER
    size_vram: int = 0
    context_length: int


class RunningModels(msgspec.Struct):
    """The models in memory."""

    models: list[RunningModel]


class ShownModel(msgspec.Struct, kw_only=True):
    """A model's chat template (in Jinja), its sampling defaults, kind, sizes, and what it can do."""

    license: str = ""
    modelfile: str = ""
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Status(msgspec.Struct):
    """Outcome of a request."""

    status: str = "success"


class OllamaModelEndpoints:
    """Handlers of the endpoints about models, none of which loads one."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._described: dict[ServedModel, DescribedModel] = {}

    async def version(self, _request: Request) -> Response:
        """Return the version of Ollama whose API this is. Not that of this server, which is at /version."""
        return json_response(OllamaVersion())

    async def tags(self, _request: Request) -> Response:
        """List each model under each of its names, and under those of its adapters."""
        described = [
            (name, await self._describe(model))
            for model in self._models
            for name in (*model.public_names, *(adapter.lora_name for adapter in model.adapters))
        ]
        return json_response(ListedModels([self._listed(with_tag(name), model) for name, model in described]))

    async def running(self, _request: Request) -> Response:
        """List the models in memory."""
        described = [(model, await self._describe(model)) for model in self._models if model.service is not None]
        loaded = [self._running(model, model.service, known) for model, known in described if model.service is not None]
        return json_response(RunningModels(loaded))

    async def show(self, request: Request) -> Response:
        """Describe a model. What only its engine knows is missing until it has been loaded once."""
        model, _ = await self._models.read(request, ShowBody)
        described = await self._describe(model)
        facts = described.facts
        shown = ShownModel(
            parameters="\n".join(_parameters({} if facts is None else facts.defaults)),
            template="" if facts is None else facts.chat_template,
            details=described.details,
            model_info=described.info(),
            capabilities=_capabilities(facts),
            modified_at=self._started,
        )
        return json_response(shown)

    async def pull(self, request: Request) -> Response:
        """Report that a model is there. No other model can be downloaded."""
        _, body = await self._models.read(request, PullBody)
        if body.named is None:
            raise bad_request("model is missing; it is required", "model", "missing_field")
        media_type = "application/json" if body.stream is False else JSON_LINES
        return Response(msgspec.json.encode(Status()) + b"\n", media_type=media_type)

    async def unmanaged(self, request: Request) -> Response:
        """Reject a request that would make, change or remove a model. Raises `ApiError` 400."""
        names = [model.name for model in self._models]
        served = f"one model, {names[0]}, which is" if len(names) == 1 else f"{', '.join(names)}, which are"
        raise ApiError(
            400,
            f"{request.url.path} is not supported: this server serves {served} chosen when it starts: quire serve "
            "MODEL",
            code="unsupported",
        )

    async def _describe(self, model: ServedModel) -> DescribedModel:
        """Return a model as its files describe it; they are read once, and once more after each load of the model."""
        known = self._described.get(model)
        if known is None or known.facts is not model.facts:
            known = self._described[model] = await asyncio.to_thread(DescribedModel.read, model)
        return known

    def _listed(self, name: str, described: DescribedModel) -> ListedModel:
        return ListedModel(
            name=name,
            model=name,
            modified_at=self._started,
            size=described.size,
            digest=described.digest,
            details=described.details,
        )

    def _running(self, model: ServedModel, service: ModelService, described: DescribedModel) -> RunningModel:
        name = with_tag(model.name)
        left = self._models.loader.seconds_left(model)
        return RunningModel(
            name=name,
            model=name,
            size=described.size,
            digest=described.digest,
            details=described.details,
            expires_at=_NEVER if math.isinf(left) else _date(now() + left),
            context_length=service.llm.max_model_len,
        )

    @property
    def _started(self) -> str:
        return _date(self._models.server.created)


def _date(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _capabilities(facts: ModelFacts | None) -> list[str]:
    """Return what a model can do, in Ollama's words; only models that generate nothing are for embeddings."""
    if facts is None:
        return ["completion"]
    if not facts.generates:
        return ["embedding"]
    can = {"completion": True, "tools": facts.calls_tools, "thinking": facts.thinks}
    return [name for name, has in can.items() if has]


def _parameters(defaults: Mapping[str, Any]) -> list[str]:
    """Return sampling defaults as lines of a Modelfile."""
    names = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
    return [
        f"{names.get(name, name)} {value}" for name, value in defaults.items() if isinstance(value, (int, float, str))
    ]
