"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM: adapters of a server that runs."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.frontend.adapters import check_files
from quire.frontend.errors import HubError
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.models.adapters import MAX_ADAPTERS
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.operations.load_turns import LoadTurns
from quire.frontend.http.transport.auth import AdminKeys
from quire.frontend.http.transport.bodies import Body
from quire.frontend.hub.adapters import resolving_adapter
from quire.frontend.hub.names import is_like_adapter_name
from quire.frontend.lora_request import MAX_NAME, absolute, check_name
from quire.frontend.path_kind import NOWHERE, what_is
from quire.protocol.messages import MAX_PATH

logger = logging.getLogger(__name__)

_DOWNLOAD_SECONDS, _CHECK_SECONDS = 3600.0, 20.0  # with the time in which others have their turn

_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, description="The name of the adapter.")]


class LoadAdapterBody(Body, kw_only=True):
    """The body of a request to serve an adapter; `model` names the model that it is for, if there are several."""

    lora_name: _Name
    lora_path: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=MAX_PATH,
            description="The adapter's name at the Hugging Face hub; or the absolute path, in a folder of "
            "--allowed-lora-folders, of a folder that PEFT has written or of a GGUF file.",
        ),
    ]
    load_inplace: Annotated[
        bool | None,
        Meta(
            description="Let the name stand for this path from now on, if there is such a name. Changed files at the "
            "path that it has are read anew for the next request in any case."
        ),
    ] = None
    is_3d_lora_weight: Annotated[
        bool | None,
        Meta(description="Accepted; it changes no result here: the file itself says whether its experts are stacked."),
    ] = None


class UnloadAdapterBody(Body, kw_only=True):
    """The body of a request to serve an adapter no longer."""

    lora_name: _Name
    lora_int_id: Annotated[int | None, Meta(description="Accepted; it changes no result here.")] = None


class AdapterEndpoints:
    """Handlers of the endpoints."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._downloads = LoadTurns("the download", _DOWNLOAD_SECONDS)
        self._checks = LoadTurns("the check", _CHECK_SECONDS)
        self._admins = AdminKeys(models.server.args.admin_keys())
        self._folders = [absolute(folder) for folder in models.server.args.allowed_lora_folders]

    async def load(self, request: Request) -> Response:
        """Serve a LoRA adapter as a model. Only its configuration is looked at now: the first request that names it has
        the engine read it, and fails if that can't be done.
        """
        self._check_allowed(request)
        model, body = await self._models.read(request, LoadAdapterBody)
        self._check_name(model, body)
        is_here, max_rank = _is_here(model), _max_rank(model)
        is_at_hub = is_here and is_like_adapter_name(body.lora_path)
        given = await self._resolved(body.lora_path) if is_at_hub else body.lora_path

        def check() -> str:
            path = given if is_at_hub else self._allowed(given, is_here=is_here)
            if is_here:
                _check_path(path, max_rank)
            return path

        body.lora_path = await self._checks.work(lambda: asyncio.to_thread(check))  # file systems may hang
        self._check_name(model, body)  # others may have come meanwhile
        model.adapters.put(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _resolved(self, name: str) -> str:
        """Return the folder of an adapter at the hub. Raises `ApiError` 404, and those of `LoadTurns`."""
        try:
            return await self._downloads.work(
                lambda: asyncio.wrap_future(resolving_adapter(name, self._models.server.download_dir))
            )
        except HubError as error:
            logger.warning("the adapter %s could not be downloaded: %s", name, error)
            reason = error if self._admins else "it can't be had from the hub; the server's log has the reason"
            raise _not_found(f"lora_path={name!r:.200}: {reason}", "lora_path") from None

    def _allowed(self, given: str, *, is_here: bool) -> str:
        """Return the path of an adapter in an allowed folder, with its links resolved if the engine is on this machine.

        Raises `ApiError` 400 or 403, which says nothing about what is at the path.
        """
        if not Path(given).is_absolute():
            raise bad_request(f"lora_path={given!r:.200} is not absolute; give the whole path", "lora_path")
        resolve = os.path.realpath if is_here else os.path.normpath
        with suppress(ValueError):  # a path with a zero
            path = Path(resolve(given))
            if any(path.is_relative_to(resolve(folder)) for folder in self._folders):
                return str(path)
        raise ApiError(
            403,
            f"lora_path={given!r:.200} is in no folder from which adapters may be loaded; give another one"
            + (", or the name of an adapter at the hub" if is_here else "")
            + ", or start the server with --allowed-lora-folders",
            code="not_allowed",
            param="lora_path",
        )

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
                "this server loads no adapters while it runs; start it with --enable-lora and --allow-runtime-lora or "
                "--admin-key-file; in front of an engine that takes any adapter, with --admin-key-file",
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
                "load_inplace to true (--load-inplace)",
                "lora_name",
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
    if what_is(path) == NOWHERE:
        raise _not_found(f"lora_path={path!r:.200} does not exist; give a folder that PEFT has written", "lora_path")
    try:
        check_files(path, max_rank)
    except ValueError as error:
        raise bad_request(str(error), "lora_path") from None


def _not_found(message: str, param: str) -> ApiError:
    return ApiError(404, message, code="adapter_not_found", param=param)
