"""The models of a server by their names, and the requests that name them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.models.loader import LoadPolicy, ModelLoader
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.server_state import ServerState, load_seconds, note_load
from quire.frontend.http.service import ModelService, keep_body
from quire.frontend.http.transport.bodies import Body, unknown_model
from quire.frontend.http.transport.sse import cancelled_on_disconnect
from quire.frontend.lora_request import LoRARequest

B = TypeVar("B", bound=Body)

HELD = "held"  # what a request holds until it has ended: an `ExitStack` in its scope
MODEL = "served_model"  # that a request names, in its scope
ADAPTER = "adapter"  # of that model, in the request's scope; None: the model alone
SERVICE = "service"  # of that model, in the request's scope once it is loaded


_MOST_NAMED = 32  # models, in an error


@dataclass(frozen=True)
class ServedModels:
    """The models of a server; requests without a name get the first.

    `max_waiting`: most requests that wait for models to be loaded.
    """

    server: ServerState
    models: Sequence[ServedModel]
    loader: ModelLoader
    max_waiting: int = 4096

    @classmethod
    def of(cls, service: ModelService) -> ServedModels:
        """Return the models of a server that has one, which stays loaded."""
        models = [ServedModel.of(service)]
        return cls(service.server, models, ModelLoader(models, LoadPolicy()))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.models)

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self.models[0]

    @property
    def are_managed(self) -> bool:
        """True if models are loaded and unloaded while the server runs."""
        return self.server.unloads_models

    @property
    def public_names(self) -> list[str]:
        """The names of all models that clients are told, and of their adapters."""
        own = [name for model in self.models for name in model.public_names]
        return own + [adapter.lora_name for model in self.models for adapter in model.adapters]

    @property
    def vocab_size(self) -> int | None:
        """The size of the largest vocabulary, None as long as one is not known."""
        sizes = [None if model.facts is None else model.facts.info.vocab_size for model in self.models]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @property
    def services(self) -> list[ModelService]:
        """The services of the loaded models."""
        return [model.service for model in self.models if model.service is not None]

    @property
    def retry_after(self) -> int:
        """Seconds after which a rejected request is worth another try."""
        return max((service.retry_after for service in self.services), default=1)

    def find(self, name: str | None, unknown: Callable[[str, Sequence[str]], ApiError] = unknown_model) -> ServedModel:
        """Return the model of a name, the first for None. Raises the error that `unknown` makes."""
        return self.find_adapted(name, unknown)[0]

    def find_adapted(
        self, name: str | None, unknown: Callable[[str, Sequence[str]], ApiError] = unknown_model
    ) -> tuple[ServedModel, LoRARequest | None]:
        """Return the same, and the adapter if the name is that of one."""
        if name is None:
            return self.default, None
        for model in self.models:
            if model.is_named(name):
                return model, None
        for model in self.models:
            if (adapter := model.adapters.find(name)) is not None:
                return model, adapter
        known = self.public_names
        raise unknown(name, known if len(known) <= _MOST_NAMED else [*known[:_MOST_NAMED], "more"])

    def asked(self, request: Request) -> ServedModel:
        """Return the model that the query of a request names. Raises `ApiError` 404."""
        model = request.scope[MODEL] = self.find(request.query_params.get("model"))
        return model

    async def read(self, request: Request, kind: type[B]) -> tuple[ServedModel, B]:
        """Return the model that the body of a request names, and the body, which is kept. Raises `ApiError`."""
        body = await self.server.read(request, kind)
        keep_body(request, body)
        model, adapter = self.find_adapted(body.named, body.unknown_model)
        request.scope[MODEL] = model
        request.scope[ADAPTER] = _scaled(model, adapter, body.adapter_scales)
        return model, body

    async def enter(self, request: Request, kind: type[Body] | None) -> ModelService:
        """Return the service of the model that a request names, in its body of a kind or else in its query.

        With a body the model is loaded if it is not, and stays loaded until the request has ended. What only looks at a
        model neither loads it nor keeps it loaded. Raises `ApiError`.
        """
        if kind is None:
            model = self.asked(request)
            if model.service is None:
                raise not_loaded(model)
            request.scope[SERVICE] = model.service
            return model.service
        model, body = await self.read(request, kind)
        return await self.hold(request, model, body.keep_seconds)

    async def hold(self, request: Request, model: ServedModel, keep_seconds: float | None = None) -> ModelService:
        """Return the service of a model, which is loaded if it is not, and stays so until the request has ended.

        `keep_seconds`: of idleness after that. Raises `ApiError` 400, 429, 499, 503 or 504.
        """
        timeout = self.server.timeout(request)
        is_there = model.service is not None and not model.makes_room
        service = await (self.loader.hold(model) if is_there else self._wait_for(request, model, timeout))
        held: ExitStack = request.scope[HELD]
        held.callback(self.loader.release, model, keep_seconds)
        adapter: LoRARequest | None = request.scope.get(ADAPTER)
        request.scope[SERVICE] = chosen = service if adapter is None else service.adapted(adapter)
        return chosen

    def check_managed(self) -> None:
        """Raise `ApiError` 400 unless models are loaded and unloaded while the server runs."""
        if not self.are_managed:
            raise bad_request(
                f"this server keeps its one model, {self.default.name}, loaded; to have models loaded and unloaded, "
                "start it with several, or with --idle-timeout",
                "model",
                "unsupported",
            )

    async def _wait_for(self, request: Request, model: ServedModel, seconds: float | None) -> ModelService:
        """Return the service of a model once it is loaded, for at most `seconds`, and note how long that took."""
        self.server.check_open(lambda: self.retry_after)
        if (waiting := sum(len(each.waiters) for each in self.models)) >= self.max_waiting:
            raise ApiError(
                429,
                f"{waiting} requests are waiting for models to be loaded, and no more may; try again later",
                code="overloaded",
                headers={"Retry-After": str(self.retry_after)},
            )
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with cancelled_on_disconnect(request.receive), asyncio.timeout(seconds):
                service = await self.loader.hold(model)
        except TimeoutError:
            raise ApiError(
                504,
                f"the request's time limit (X-Request-Timeout, or the server's) was up before its model {model.name} "
                "was loaded; allow more time",
                code="deadline_exceeded",
            ) from None
        note_load(request, load_seconds(request) + clock() - began)
        return service


def _scaled(model: ServedModel, named: LoRARequest | None, scales: Mapping[int, float]) -> LoRARequest | None:
    """Return the adapter that a request names as its model, or to which it gives the scale 1, see `Body`.

    Raises `ApiError` 400 for the number of no adapter, and for scales that contradict the name.
    """
    chosen, numbered = named, model.adapters.by_number() if scales else {}
    for index, (number, scale) in enumerate(scales.items()):
        if (adapter := numbered.get(number)) is None:
            raise bad_request(
                f"lora[{index}].id={number} is not the id of an adapter; GET /lora-adapters lists them", "lora"
            )
        if named is not None and (adapter == named) != bool(scale):
            raise bad_request(
                f"model names the adapter {named.lora_name!r:.100}, and lora[{index}] has id {number} with the scale "
                f"{scale:g}; leave one out",
                "lora",
            )
        chosen = adapter if scale else chosen
    return chosen


def not_loaded(model: ServedModel) -> ApiError:
    """Return the error of requests that look at a model which is not loaded."""
    return ApiError(
        503, f"the model {model.name} is not loaded; a request for text from it loads it", code="model_not_loaded"
    )
