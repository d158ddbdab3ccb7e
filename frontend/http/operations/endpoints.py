"""The endpoints for health, version, metrics and models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.transport.responses import json_response
from quire.frontend.lora_request import LoRARequest
from quire.frontend.metrics.server import render
from quire.frontend.sampling import SamplingParams
from quire.frontend.version import installed_version


class Health(msgspec.Struct):
    """The state of the server, and what computes its only model: `cpu`, or a GPU as `cuda:0`; of several engines each
    device once. `fast_matmul`: the bits of one of them are not the CPU's (--fast-matmul); left out of others.
    """

    status: str = "ok"
    devices: list[str] | msgspec.UnsetType = msgspec.UNSET
    fast_matmul: bool | msgspec.UnsetType = msgspec.UNSET


class Version(msgspec.Struct):
    """The version of Quire."""

    version: str


class SamplingDefaults(msgspec.Struct):
    """The sampling values of requests that omit them."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


class ModelStatus(msgspec.Struct, omit_defaults=True):
    """The state of a model: loaded, loading, unloaded, or sleeping if it was idle. `failed`: it could not be loaded."""

    value: str
    failed: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """A model under one of its names.

    `created`: the server's start time; `root`: the model's folder; `parent`: of an adapter, the name of its model;
    `requests`: of an adapter, this server's open requests that name it; `sampling_defaults`: those of the model and the
    server's flags. What only the engine knows is null until the model has been loaded once. `status` is llama.cpp's.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    requests: int | None = None
    max_model_len: int | None = None
    has_chat_template: bool | None = None
    sampling_defaults: SamplingDefaults | None = None
    status: ModelStatus
    permission: list[Any] = []


class ModelList(msgspec.Struct, kw_only=True):
    """Each model under each of its names."""

    object: str = "list"
    data: list[ModelCard]


class OperatorEndpoints:
    """Handlers of the endpoints for operators, none of which loads a model."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def health(self, _request: Request) -> Response:
        """Check that the server is not shutting down, and that the engine of its only model makes steps or is idle, or
        could be started. Needs no API key. With several models /v1/models tells how each does.
        """
        health = Health()
        if len(self._models.models) == 1:
            only = self._models.default
            if only.service is not None:
                await only.service.llm.check_health()
                engines = only.service.llm.engines()
                health.devices = sorted({engine.ready.device for engine in engines})
                if any(engine.ready.fast_matmul for engine in engines):
                    health.fast_matmul = True
            elif only.failure is not None:
                raise self._models.loader.failed(only, only.failure)
        self._models.server.check_open(lambda: self._models.retry_after)
        return json_response(health)

    async def ready(self, request: Request) -> Response:
        """Check that the server accepts requests; the same as /health."""
        return await self.health(request)

    async def ping(self, request: Request) -> Response:
        """Check the server as /health does. Under the name that some load balancers ask for; needs no API key."""
        return await self.health(request)

    async def version(self, _request: Request) -> Response:
        """Return the version of the server."""
        return json_response(Version(installed_version()))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics. In Prometheus' text format, or in OpenMetrics' if Accept asks for it."""
        found = [(model.metrics, None if model.service is None else model.service.llm) for model in self._models]
        body, media_type = await render(found, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})

    async def models(self, _request: Request) -> Response:
        """List each model under each of its names, and whether it is loaded; then their adapters."""
        cards = [self._card(name, model) for model in self._models for name in model.public_names]
        for model in self._models:
            numbers = model.metrics.adapter_requests()
            cards += [self._adapter_card(each.lora_name, model, each, numbers) for each in model.adapters]
        return json_response(ModelList(data=cards))

    async def model(self, request: Request) -> Response:
        """Describe a model under one of its names."""
        name = request.path_params["name"]
        model, adapter = self._models.find_adapted(name)
        if adapter is None:
            return json_response(self._card(name, model))
        return json_response(self._adapter_card(name, model, adapter, model.metrics.adapter_requests()))

    def _adapter_card(
        self, name: str, model: ServedModel, adapter: LoRARequest, num_requests: Counter[str]
    ) -> ModelCard:
        card = self._card(name, model)
        card.root, card.parent, card.requests = adapter.lora_path, model.name, num_requests[adapter.lora_name]
        return card

    def _card(self, name: str, model: ServedModel) -> ModelCard:
        facts = model.facts
        card = ModelCard(
            id=name,
            created=self._models.server.created,
            root=model.path if facts is None else facts.root,
            status=ModelStatus(model.state, failed=model.failure is not None),
        )
        if facts is not None:
            card.max_model_len = facts.info.max_model_len
            card.has_chat_template = facts.has_chat_template
            card.sampling_defaults = msgspec.convert(
                SamplingParams(**facts.defaults), SamplingDefaults, from_attributes=True
            )
        return card
