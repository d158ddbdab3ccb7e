"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM: adapters of a server that runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.frontend.adapters import check_files
from quire.frontend.errors import HubError
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.models.adapters import MAX_ADAPTERS
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.transport.auth import AdminKeys
from quire.frontend.http.transport.bodies import Body, Refusals
from quire.frontend.hub.adapters import resolving_adapter
from quire.frontend.hub.names import is_adapter_name
from quire.frontend.lora_request import MAX_NAME, check_name
from quire.protocol.messages import MAX_PATH

_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, description="The name of the adapter.")]


class LoadAdapterBody(Body, kw_only=True):
    """The body of a request to serve an adapter; `model` names the model that it is for, if there are several."""

    refused: ClassVar[Refusals] = {"is_3d_lora_weight": ((False,), "adapters of experts are not supported")}

    lora_name: _Name
    lora_path: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=MAX_PATH,
            description="The absolute path of a folder that PEFT has written, or of a GGUF file, on this machine; or "
            "the adapter's name at the Hugging Face hub.",
        ),
    ]
    load_inplace: Annotated[
        bool | None, Meta(description="Let the name stand for another path from now on, if there is such a name.")
    ] = None


class UnloadAdapterBody(Body, kw_only=True):
    """The body of a request to serve an adapter no longer."""

    lora_name: _Name
    lora_int_id: Annotated[int | None, Meta(description="Accepted; it changes no result here.")] = None


class AdapterEndpoints:
    """Handlers of the endpoints."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._downloads = asyncio.Lock()
        self._admins = AdminKeys(models.server.args.admin_keys())

    async def load(self, request: Request) -> Response:
        """Serve a LoRA adapter as a model. Only its configuration is looked at now: the first request that names it has
        the engine read it, and fails if that can't be done.
        """
        self._check_allowed(request)
        model, body = await self._models.read(request, LoadAdapterBody)
        self._check_name(model, body)
        is_of_hub = _is_here(model) and is_adapter_name(body.lora_path)
        if not is_of_hub and not Path(body.lora_path).is_absolute():
            raise bad_request(f"lora_path={body.lora_path!r:.200} is not absolute; give the whole path", "lora_path")
        if _is_here(model):
            max_rank = _max_rank(model)
            if is_of_hub:
                body.lora_path = await self._resolved(body.lora_path)
            await asyncio.to_thread(_check_path, body.lora_path, max_rank)
            self._check_name(model, body)  # others may have come meanwhile
        model.adapters.put(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _resolved(self, name: str) -> str:
        """Return the folder of an adapter at the hub, one after the other. Raises `ApiError` 404."""
        async with self._downloads:
            try:
                return await asyncio.wrap_future(resolving_adapter(name))
            except HubError as error:
                raise _not_found(f"lora_path={name!r:.200}: {error}", "lora_path") from None

    async def unload(self, request: Request) -> Response:
        """Serve a LoRA adapter no longer. Requests that have begun go on."""
        self._check_allowed(request)
        _, body = await self._models.read(request, UnloadAdapterBody)
        if not any(model.adapters.remove(body.lora_name) for model in self._models):
            raise _not_found(f"the LoRA adapter {body.lora_name!r} cannot be found; /v1/models lists them", "lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check_allowed(self, request: Request) -> None:
        """Raise `ApiError` 403 unless the server loads adapters, for administrators if it has keys of such."""
        if not self._models.server.loads_adapters:
            raise ApiError(
                403,
                "this server loads no adapters while it runs; start it with --enable-lora --allow-runtime-lora, or, in "
                "front of an engine that was started with these, with --admin-key-file",
                code="not_allowed",
            )
        if self._admins:
            self._admins.check(request, "loading and unloading adapters")

    def _check_name(self, model: ServedModel, body: LoadAdapterBody) -> None:
        """Raise `ApiError` 400 for a name or a path that the adapter cannot have."""
        name = body.lora_name
        try:
            check_name(name)
        except ValueError as error:
            raise bad_request(f"lora_name: {error}", "lora_name") from None
        if any(other.is_named(name) for other in self._models):
            raise bad_request(f"lora_name={name!r} is the name of a model; give another one", "lora_name")
        own = model.adapters.find(name)
        if own is None and any(other.adapters.find(name) for other in self._models):
            raise bad_request(
                f"lora_name={name!r} is the name of another model's adapter; give another one", "lora_name"
            )
        if own is not None and not body.load_inplace:
            raise bad_request(
                f"the lora adapter {name!r} has already been loaded; to let the name stand for another path, set "
                "load_inplace to true",
                "lora_name",
            )
        if own is not None and own.lora_path == body.lora_path:
            raise bad_request(
                f"the lora adapter {name!r} has this path already, and the engine keeps what it has read from there; "
                "write changed files to another one",
                "lora_path",
            )
        if own is None and len(model.adapters) >= MAX_ADAPTERS:
            raise bad_request(f"{MAX_ADAPTERS} adapters are loaded, and no more can be; unload one first", "lora_name")


def _is_here(model: ServedModel) -> bool:
    """Return whether the engine sees the files of this machine."""
    return model.service is None or model.service.llm.engine_address.startswith("ipc://")


def _max_rank(model: ServedModel) -> int | None:
    """Return the largest rank of adapters, None if it isn't known. Raises `ApiError` 403 if there can be no adapter."""
    if (facts := model.facts) is None:
        return None
    if facts.info.adapters is None or not facts.info.adapters.takes_any:
        raise ApiError(
            403,
            "the engine takes no adapters but those with which it was started; start it with --enable-lora and "
            "--allow-runtime-lora",
            code="not_allowed",
        )
    return facts.info.adapters.max_rank


def _check_path(path: str, max_rank: int | None) -> None:
    """Raise `ApiError` 404 for a path where nothing is, and 400 for what is no adapter."""
    if not Path(path).exists():
        raise _not_found(f"lora_path={path!r:.200} does not exist; give a folder that PEFT has written", "lora_path")
    try:
        check_files(path, max_rank)
    except ValueError as error:
        raise bad_request(str(error), "lora_path") from None


def _not_found(message: str, param: str) -> ApiError:
    return ApiError(404, message, code="adapter_not_found", param=param)
