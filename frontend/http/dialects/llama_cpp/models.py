"""`POST /models/load` and `/models/unload`, `GET /props` and `/lora-adapters`: what needs no loaded model."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.dialects.llama_cpp.body import ModelNameBody
from quire.frontend.http.dialects.llama_cpp.state import ServerProperties, StateEndpoints
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels, not_loaded
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.auth import AdminKeys
from quire.frontend.http.transport.responses import json_response


class Success(msgspec.Struct):
    """The request has been accepted."""

    success: bool = True


class LoraAdapter(msgspec.Struct):
    """A LoRA adapter. `scale` is 0, since none is applied to requests that do not name it."""

    id: int
    path: str
    scale: float = 0.0


class LlamaServerEndpoints:
    """Handlers of the endpoints about the server and all of its models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._properties: dict[ServedModel, ServerProperties] = {}
        models.loader.on_open(self._note)
        self._admins = AdminKeys(models.server.args.admin_keys())

    async def props(self, request: Request) -> Response:
        """Describe the server and the model that ?model= names. For clients of llama.cpp; /v1/models has the same for
        all others. It loads no model, and is status 503 for one that was never loaded.
        """
        model = self._models.asked(request)
        if (known := self._properties.get(model)) is None:
            raise not_loaded(model)
        return json_response(msgspec.structs.replace(known, is_sleeping=model.service is None))

    def _note(self, model: ServedModel, service: ModelService) -> None:
        self._properties[model] = service.endpoints(StateEndpoints).properties

    async def load(self, request: Request) -> Response:
        """Begin to load a model. Requests for it wait until it is loaded; /v1/models has its `status`."""
        self._check_admin(request)
        model = await self._named(request)
        if (model.service is not None or model.loading is not None) and not model.is_unwanted:
            raise bad_request(f"the model {model.name} is loaded already", "model")
        self._models.loader.load(model)
        return json_response(Success())

    async def unload(self, request: Request) -> Response:
        """Unload a model as soon as its open requests have ended, unless new ones come before that."""
        self._check_admin(request)
        model = await self._named(request)
        if model.service is None and model.loading is None:
            raise bad_request(f"the model {model.name} is not loaded", "model")
        self._models.check_managed()
        self._models.loader.unload(model)
        return json_response(Success())

    async def adapters(self, request: Request) -> Response:
        """List the LoRA adapters of the model that ?model= names. A request names one by its `id`, in `lora`, or as its
        model by the name in /v1/models.
        """
        known = self._models.asked(request).adapters
        return json_response([LoraAdapter(known.number_of(each), each.lora_path) for each in known])

    async def unsaved(self, request: Request) -> Response:
        """Reject a request to save, restore or erase the cache of a slot. Raises `ApiError` 400."""
        raise ApiError(
            400,
            f"POST {request.url.path} is not supported: requests share one cache of prefixes, which keeps itself",
            code="unsupported",
        )

    def _check_admin(self, request: Request) -> None:
        """Raise `ApiError` 403 for a request without the admin key, if there is one."""
        if self._admins:
            self._admins.check(request, "loading and unloading models")

    async def _named(self, request: Request) -> ServedModel:
        model, body = await self._models.read(request, ModelNameBody)
        if body.named is None:
            raise bad_request("model is missing; it is required", "model", "missing_field")
        return model
